// As much of a system as a static program of one thread needs: it is loaded, its few calls are answered, what it prints
// goes to the first serial port. Everything runs at the same privilege in one address space.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define PROGRAM ((const u8*)0xffe00000)  // the ELF file, at the start of the ROM
#define STACK 0x4000000                  // below it the program's stack, above it what it maps
#define CODE 24                          // the segment of 64-bit code

struct header { u8 ident[16]; u16 type, machine; u32 version; u64 entry, segments, sections; u32 flags; u16 size, segment_size, count; };
struct segment { u32 type, flags; u64 offset, address, physical, file_size, size, align; };
struct gate { u16 low, selector; u8 stack, type; u16 middle; u32 high, zero; };

void on_syscall(void);
extern u8 handlers[32][32];

static u64 heap, mapped = STACK;
static struct gate gates[32];

static void out(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static u8 in(u16 port) {
  u8 value;
  __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}
static void set_register(u32 which, u64 value) {
  __asm__ volatile("wrmsr" ::"c"(which), "a"((u32)value), "d"((u32)(value >> 32)));
}

static void put(const char* text, u64 n) {
  for (; n > 0; --n, ++text) {
    while (!(in(0x3fd) & 0x20)) {}
    out(0x3f8, *text);
  }
}

static void put_hex(u64 value) {
  for (int shift = 60; shift >= 0; shift -= 4) put(&"0123456789abcdef"[value >> shift & 15], 1);
}

static void stop(u64 status) {
  put("exit ", 5);
  put(&"0123456789abcdef"[status & 15], 1);
  put("\n", 1);
  while (!(in(0x3fd) & 0x40)) {}
  for (const char* c = "Shutdown"; *c; ++c) out(0x8900, *c);
  for (;;) __asm__ volatile("hlt");
}

void fault(u64 vector, u64 address) {
  put("fault ", 6);
  put_hex(vector);
  put(" at ", 4);
  put_hex(address);
  put("\n", 1);
  stop(15);
}

u64 syscall(u64 number, u64 a, u64 b, u64 c) {
  switch (number) {
    case 1:  // write
      put((const char*)b, c);
      return c;
    case 20: {  // writev
      u64 total = 0;
      for (u64 i = 0; i < c; ++i) {
        const u64* part = (const u64*)b + 2 * i;
        put((const char*)part[0], part[1]);
        total += part[1];
      }
      return total;
    }
    case 9: {  // mmap, of nothing that has a name
      const u64 at = mapped;
      mapped += (b + 4095) & ~4095ul;
      return at;
    }
    case 10:  // mprotect
    case 11:  // munmap
      return 0;
    case 12:  // brk
      if (a > heap) heap = a;
      return heap;
    case 60:   // exit
    case 231:  // exit_group
      stop(a);
      return 0;
    case 158:  // arch_prctl
      if (a != 0x1002) return -22;
      set_register(0xc0000100, b);  // FS
      return 0;
    default:
      return -38;  // ENOSYS
  }
}

void start_system(void) {
  out(0x3fb, 3);  // 8 bits
  for (int i = 0; i < 32; ++i) {
    const u64 at = (u64)handlers[i];
    gates[i] = (struct gate){(u16)at, CODE, 0, 0x8e, (u16)(at >> 16), (u32)(at >> 32), 0};
  }
  struct { u16 limit; u64 base; } __attribute__((packed)) table = {sizeof gates - 1, (u64)gates};
  __asm__ volatile("lidt %0" ::"m"(table));
  set_register(0xc0000081, (u64)CODE << 32);       // STAR
  set_register(0xc0000082, (u64)on_syscall);       // LSTAR
  set_register(0xc0000084, 0);                     // SFMASK

  const struct header* elf = (const struct header*)PROGRAM;
  u64 base = 0;
  for (int i = 0; i < elf->count; ++i) {
    const struct segment* s = (const struct segment*)(PROGRAM + elf->segments + i * elf->segment_size);
    if (s->type != 1) continue;
    if (s->offset == 0) base = s->address;
    for (u64 k = 0; k < s->size; ++k) ((u8*)s->address)[k] = k < s->file_size ? PROGRAM[s->offset + k] : 0;
    heap = (s->address + s->size + 4095) & ~4095ul;
  }
  u64* stack = (u64*)(STACK - 4096);
  u64 words[] = {1, (u64)"program", 0, 0, 3, base + elf->segments, 4, elf->segment_size, 5, elf->count, 6, 4096, 25, (u64)PROGRAM, 0, 0};
  for (u64 i = 0; i < sizeof words / 8; ++i) stack[i] = words[i];
  __asm__ volatile("mov %0, %%rsp; xor %%edx, %%edx; jmp *%1" ::"r"(stack), "r"(elf->entry));
}

__asm__(
    ".section .first, \"ax\"; call start_system\n"
    ".text\n"
    // A program may use 128 bytes below its stack.
    "on_syscall: lea -128(%rsp), %rsp; push %rcx; push %r11; push %rdi; push %rsi; push %rdx; push %r8; push %r9; push %r10\n"
    "mov %rdx, %rcx; mov %rsi, %rdx; mov %rdi, %rsi; mov %rax, %rdi; call syscall\n"
    "pop %r10; pop %r9; pop %r8; pop %rdx; pop %rsi; pop %rdi; pop %r11; pop %rcx; lea 128(%rsp), %rsp; push %r11; popf; jmp *%rcx\n"
    // Of a fault: its vector. Some push a code before the address: those of the mask.
    ".balign 32\nhandlers: .set vector, 0\n"
    ".rept 32\n"
    ".balign 32\n"
    ".if (0x60227d00 >> vector) & 1\n pop %rsi\n .endif\n"
    "pop %rsi; mov $vector, %edi; and $-16, %rsp; call fault\n"
    ".set vector, vector + 1\n"
    ".endr\n");
