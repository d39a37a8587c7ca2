"""The cores that a process has."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from math import ceil
from pathlib import Path

TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
CGROUP_2 = "sys/fs/cgroup/cpu.max"
CGROUP_1 = "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"
UNLIMITED = 2**16


def num_cores(root: Path = Path("/"), processors: Collection[int] | None = None) -> int:
    """Physical cores among the processors that this process may run on, and no more than a container's quota
    of time comes to: a thread beyond either would wait for the others. processors: None asks the system."""
    return max(1, min(len(one_per_core(root, processors)), _quota(root)))


def one_per_core(root: Path = Path("/"), processors: Collection[int] | None = None) -> list[int]:
    """The first processor of every core among those that this process may run on. processors: as above."""
    if processors is None:
        allowed = getattr(os, "sched_getaffinity", None)  # Linux
        processors = allowed(0) if allowed else range(os.cpu_count() or 1)
    first: dict[str, int] = {}
    for processor in sorted(processors):
        first.setdefault(_siblings(root, processor), processor)
    return list(first.values())


def _siblings(root: Path, processor: int) -> str:
    """What names a processor's core: all that share it."""
    with suppress(OSError):
        return (root / TOPOLOGY.format(processor)).read_text()
    return str(processor)


def _quota(root: Path) -> int:
    """Processors' worth of time that a container has, rounded up; without a limit a large number."""
    with suppress(OSError, ValueError):  # not a number: "max"
        quota, period = map(int, (root / CGROUP_2).read_text().split())
        return ceil(quota / period)
    with suppress(OSError, ValueError):
        quota, period = (int((root / name).read_text()) for name in CGROUP_1)
        return ceil(quota / period) if quota > 0 else UNLIMITED
    return UNLIMITED
