"""The extension's sources under sanitisers: the pool for races, a forward for what is read outside."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/native"


def build(tmp_path: Path, driver: str, sources: list[str], *flags: str) -> Path:
    """A driver beside this file, compiled with sources of the extension; skips where that cannot be."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    program = tmp_path / "program"
    command = [compiler, "-std=c++17", "-g", "-w", f"-I{SOURCES}", *flags]
    files = [str(HERE / driver), *(str(SOURCES / name) for name in sources)]
    built = subprocess.run(
        [*command, *files, "-o", str(program), "-lpthread"], capture_output=True, text=True
    )
    if "-fsanitize" in built.stderr or "cannot find" in built.stderr:
        pytest.skip(f"no sanitiser: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr[-3000:]
    return program


def test_pool_has_no_races(tmp_path: Path) -> None:
    program = build(tmp_path, "pool_stress.cpp", ["pool.cpp"], "-O1", "-fsanitize=thread")
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("the thread sanitiser does not run on this kernel")
    assert result.stdout == "ok\n" and result.returncode == 0, result.stderr[-3000:]


def test_a_forward_reads_nothing_outside(tmp_path: Path) -> None:
    sources = ["forward.cpp", "level_portable.cpp", "packing.cpp", "pool.cpp", "weights.cpp"]
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if platform.machine() in ("x86_64", "AMD64"):
        sources.append("level_avx2.cpp")
        flags += ["-DSPECINFER_X86", "-mavx2", "-mfma", "-mf16c"]
    program = build(tmp_path, "forward_stress.cpp", [*sources, "cpu.cpp"], *flags)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert result.stdout == "ok\n" and result.returncode == 0, result.stderr[-3000:]
