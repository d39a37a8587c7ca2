"""KVPool: the K and V of one model, one slot a token."""

from __future__ import annotations

import math

import numpy as np
import torch

CACHE_LINE = 64


class KVPool:
    """Per layer one K and one V tensor, [num_slots + num_scratch + 1, num_kv_heads, head_dim]; for a feature
    draft, likewise by slot, `rows` [.., row_size] of its target, and below tokens that the target has not
    read its own.

    Slots below num_slots are the shared ones (one numbering for the target and every draft of its tokenizer);
    the next num_scratch belong to this model alone and outlive no step; the last one is `null_slot`, always
    zero, for padding. `filled[slot]` says whether this model's K/V of the token in a shared slot is written,
    and nothing of others.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch: int = 0,
        row_size: int = 0,
    ) -> None:
        total = num_slots + num_scratch + 1
        shape = (total, num_kv_heads, head_dim)
        self.k = [zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v = [zeros(shape, dtype, device) for _ in range(num_layers)]
        self.rows = zeros((total, row_size), rows_dtype(dtype, device), device) if row_size else None
        self.num_slots = num_slots
        self.num_scratch = num_scratch
        self.null_slot = total - 1
        self.filled = np.zeros(total, np.bool_)

    @property
    def scratch_start(self) -> int:
        """The first scratch slot."""
        return self.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory of all layers, and of the rows."""
        return sum(t.nbytes for t in (*self.k, *self.v)) + (0 if self.rows is None else self.rows.nbytes)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As torch's; but on a CPU, where those are written, memory is taken as slots are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def rows_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the rows kept beside K/V of `dtype`: on a CPU what a native forward computes in."""
    return torch.float32 if device.type == "cpu" else dtype


def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """K/V memory of one token."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
