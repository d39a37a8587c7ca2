"""The thread pool under the thread sanitiser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/native"


def test_pool_has_no_races(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    program = tmp_path / "stress"
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{SOURCES}"]
    files = [str(HERE / "pool_stress.cpp"), str(SOURCES / "pool.cpp")]
    built = subprocess.run(
        [*command, *files, "-o", str(program), "-lpthread"], capture_output=True, text=True
    )
    if built.returncode:
        pytest.skip(f"no thread sanitiser: {built.stderr[-200:]}")
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("the thread sanitiser does not run on this kernel")
    assert result.stdout == "ok\n" and result.returncode == 0, result.stderr[-3000:]
