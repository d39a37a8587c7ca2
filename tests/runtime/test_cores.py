"""How many threads are worth having."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.runtime.cores import num_cores, one_per_core


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "nonsense\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
    ids=str,
)
def test_physical_cores_within_a_quota(tmp_path: Path, quota: dict[str, str], cores: int) -> None:
    """Four cores of two processors each."""
    for processor in range(8):
        siblings = {
            f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list": f"{processor % 4},x\n"
        }
        write(tmp_path, siblings)
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in quota.items()})
    assert num_cores(tmp_path, range(8)) == cores
    assert num_cores(tmp_path, [1, 5]) == 1
    assert one_per_core(tmp_path, [7, 5, 6, 1]) == [1, 6, 7]


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert num_cores(tmp_path, range(3)) == 3
    assert num_cores() >= 1
