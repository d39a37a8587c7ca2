"""Native runners over tiny models, and the torch runner they are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.attention import TorchAttention
from specinfer.cache import KVPool
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import build_model, open_checkpoint
from specinfer.runtime import ModelRunner
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


def make_pool(path: Path, dtype: torch.dtype) -> KVPool:
    c = open_checkpoint(path).config
    return KVPool(
        num_layers=c.num_layers,
        num_slots=NUM_SLOTS,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        dtype=dtype,
        device=CPU,
    )


def native_runner(
    path: Path,
    weights: torch.dtype = torch.float32,
    kv: torch.dtype = torch.float32,
    level: str = "",
    num_threads: int = 2,
) -> NativeRunner:
    pool = make_pool(path, kv)
    if not has_level(level):
        pytest.skip(f"this CPU has no {level}")
    return NativeRunner(open_checkpoint(path), weights, pool, 512, level=level, num_threads=num_threads)


def torch_runner(path: Path) -> ModelRunner:
    pool = make_pool(path, torch.float32)
    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    attention = TorchAttention(
        pool.k, pool.v, num_heads=c.num_heads, scale=c.head_dim**-0.5, null_slot=pool.null_slot
    )
    return ModelRunner(build_model(checkpoint, LinearFactory(torch.float32, CPU), 512), pool, attention, CPU)


class Runners:
    """The helpers above, for tests (importlib mode has no package to import them from)."""

    native = staticmethod(native_runner)
    torch = staticmethod(torch_runner)
    num_slots = NUM_SLOTS


@pytest.fixture(scope="session")
def runners() -> type[Runners]:
    return Runners
