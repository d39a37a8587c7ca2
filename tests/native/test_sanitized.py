"""The extension's sources under sanitisers: the pool for races, kernels and forwards for reads outside."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specinfer.runtime.native import LEVELS

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/native"
OUTSIDE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSPECINFER_X86"]
AVX2 = ["-mfma", "-mf16c", "-mavx2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
LEVEL_FLAGS = {
    "level_portable.cpp": [],
    "level_avx2.cpp": AVX2,
    "level_avx512.cpp": AVX512,
    "level_avx512_bf16.cpp": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
}


def run_compiler(*arguments: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    built = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    if "-fsanitize" in built.stderr or "cannot find" in built.stderr:
        pytest.skip(f"no sanitiser: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr[-3000:]


def build(directory: Path, flags: list[str], sources: dict[str, list[str]]) -> list[str]:
    """Objects of the extension's sources and of drivers beside this file, each with flags of its own."""

    def build_one(name: str) -> str:
        source = next(path for path in (SOURCES / name, HERE / name) if path.exists())
        object_file = str(directory / f"{source.stem}.o")
        command = ["-std=c++17", "-g", "-w", f"-I{SOURCES}", *flags, *sources[name]]
        run_compiler(*command, "-c", str(source), "-o", object_file)
        return object_file

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(build_one, sources))


def check_output(directory: Path, objects: list[str], flags: list[str]) -> str:
    program = str(directory / "program")
    run_compiler(*flags, *objects, "-o", program, "-lpthread")
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("the thread sanitiser does not run on this kernel")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory, runners: Any) -> list[str]:
    """What every program of the extension's kernels is linked of."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the levels are those of x86-64")
    sources: dict[str, list[str]] = {**LEVEL_FLAGS, "packing.cpp": [], "cpu.cpp": []}
    for level in LEVELS:
        if not runners.has_level(level):  # compiled and linked, but not run
            sources[f"level_{level}.cpp"] = [*LEVEL_FLAGS[f"level_{level}.cpp"], "-fno-sanitize=all"]
    return build(tmp_path_factory.mktemp("kernels"), OUTSIDE, sources)


def test_pool_has_no_races(tmp_path: Path) -> None:
    flags = ["-O1", "-fsanitize=thread"]
    objects = build(tmp_path, flags, {"pool_stress.cpp": [], "pool.cpp": []})
    assert check_output(tmp_path, objects, flags) == "ok\n"


def test_a_forward_reads_nothing_outside(kernels: list[str], tmp_path: Path) -> None:
    sources = dict.fromkeys(
        ["forward_stress.cpp", "forward.cpp", "forward_plan.cpp", "pool.cpp", "weights.cpp"], []
    )
    assert check_output(tmp_path, kernels + build(tmp_path, OUTSIDE, sources), OUTSIDE) == "ok\n"


def test_choices_read_nothing_outside(tmp_path: Path) -> None:
    sources: dict[str, list[str]] = {"choice_stress.cpp": [], "choice.cpp": []}
    assert check_output(tmp_path, build(tmp_path, OUTSIDE, sources), OUTSIDE) == "ok\n"


def test_levels_agree(kernels: list[str], tmp_path: Path) -> None:
    """Those that this CPU has. scripts/emulation/run does the same on an emulated CPU that has them all."""
    output = check_output(tmp_path, kernels + build(tmp_path, OUTSIDE, {"level_check.cpp": []}), OUTSIDE)
    for level in LEVELS:
        assert f"{level} ok\n" in output or f"this CPU has no {level}\n" in output
    assert "portable ok\n" in output and "best: " in output
