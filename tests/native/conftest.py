"""Native runners over tiny models, and the torch runner they are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.models.linear import LinearFactory
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import ModelRunner, make_pool, make_torch_runner
from specinfer.runtime.native import NativeRunner, extension

CPU = torch.device("cpu")
NUM_SLOTS = 400


def has_level(level: str) -> bool:
    module = extension()
    try:
        return module is not None and bool(module.level(level))
    except ValueError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if extension() is None:
        for item in items:
            if "tests/native/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="specinfer._cpu was not built"))


def native_runner(
    path: Path,
    weights: torch.dtype = torch.float32,
    kv: torch.dtype = torch.float32,
    level: str = "",
    num_threads: int = 2,
) -> NativeRunner:
    if not has_level(level):
        pytest.skip(f"this CPU has no {level}")
    checkpoint = open_checkpoint(path)
    pool = make_pool(checkpoint.config, NUM_SLOTS, kv, CPU)
    return NativeRunner(checkpoint, weights, pool, 512, level=level, num_threads=num_threads)


def torch_runner(path: Path) -> ModelRunner:
    checkpoint = open_checkpoint(path)
    pool = make_pool(checkpoint.config, NUM_SLOTS, torch.float32, CPU)
    return make_torch_runner(checkpoint, LinearFactory(torch.float32, CPU), pool, 512)


class Runners:
    """The helpers above, for tests (importlib mode has no package to import them from)."""

    native = staticmethod(native_runner)
    torch = staticmethod(torch_runner)
    num_slots = NUM_SLOTS


@pytest.fixture(scope="session")
def runners() -> type[Runners]:
    return Runners
