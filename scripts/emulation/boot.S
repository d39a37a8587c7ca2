# From the reset vector to 64-bit code with AVX-512 on: the top of a 2 MiB ROM, which begins with the program (an ELF
# file) and has system.c's code 64 KiB below its end.
        .set ROM, 0xfffff000          # where this page is
        .set SYSTEM_IN_ROM, 0xffff0000
        .set SYSTEM, 0x100000         # where system.c is linked
        .set SYSTEM_BYTES, 0xf000
        .set TABLES, 0x1000           # page tables: one PML4, one PDPT, four PDs
        .section .boot, "ax"
        .globl start
start:  .code16
        cli
        movb $2, %al                  # address line 20
        outb %al, $0x92
        lgdtl %cs:0xf000 + (gdtr - start)
        movl %cr0, %eax
        orb $1, %al
        movl %eax, %cr0
        ljmpl $8, $ROM + (protected - start)

        .code32
protected:
        movw $16, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %ss
        movl $SYSTEM_IN_ROM, %esi
        movl $SYSTEM, %edi
        movl $SYSTEM_BYTES / 4, %ecx
        cld
        rep movsl
        movl $TABLES, %edi            # 4 GiB where it is, in pages of 2 MiB
        xorl %eax, %eax
        movl $6 * 1024, %ecx
        rep stosl
        movl $TABLES + 0x1000 + 3, TABLES
        movl $TABLES + 0x2000 + 3, %eax
        movl $TABLES + 0x1000, %edi
        movl $4, %ecx
1:      movl %eax, (%edi)
        addl $0x1000, %eax
        addl $8, %edi
        loop 1b
        movl $0x83, %eax
        movl $TABLES + 0x2000, %edi
        movl $2048, %ecx
2:      movl %eax, (%edi)
        addl $0x200000, %eax
        addl $8, %edi
        loop 2b
        movl $0x40620, %eax           # PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
        movl %eax, %cr4
        movl $TABLES, %eax
        movl %eax, %cr3
        movl $0xc0000080, %ecx        # EFER: syscall, long mode
        rdmsr
        orl $0x101, %eax
        wrmsr
        movl %cr0, %eax
        andl $~0xc, %eax              # neither EM nor TS
        orl $0x80000002, %eax         # PG, MP
        movl %eax, %cr0
        movl $7, %eax
        xorl %ecx, %ecx
        cpuid
        movl $7, %eax                 # the states of x87, SSE and AVX, and of AVX-512 where that is
        testl $1 << 16, %ebx
        jz 3f
        orl $0xe0, %eax
3:      xorl %ecx, %ecx
        xorl %edx, %edx
        xsetbv
        ljmpl $24, $ROM + (long - start)

        .code64
long:   movl $0x80000, %esp
        movl $SYSTEM, %eax
        jmp *%rax

        .balign 8
gdt:    .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff, 0x00af9a000000ffff, 0x00cf92000000ffff
gdtr:   .word gdtr - gdt - 1
        .long ROM + (gdt - start)

        .org 0xff0
        .code16
        jmp start
        .org 0x1000
