"""How the weights of a native model are kept: one type for every packed linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from specinfer.models.gguf import GGUFFile
from specinfer.models.loader import Checkpoint
from specinfer.models.weights import FEATURES
from specinfer.runtime.layout import LAYOUTS

Keep = Literal["dtype", "stored", "int8"]
"""All in a dtype; in the blocks that a GGUF stores; in Q8_0. Where the last two do not go: the dtype."""

BLOCK_TYPES = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
"""GGUF's that the extension multiplies as they are."""
Q8_0_INPUTS = 32


def linear_types(checkpoint: Checkpoint, keep: Keep, dtype: torch.dtype) -> list[str]:
    """The type of every packed linear: each layer's, the head, unless it is tied the embedding, and what a
    feature draft reads by."""
    config = checkpoint.config
    layout = LAYOUTS[config.model_type]
    fallback = type_name(dtype)
    ends = [[layout.embedding]] if config.tie_embeddings else [["lm_head"], [layout.embedding]]
    if keep == "int8":
        hidden = config.hidden_size
        inputs = [hidden, hidden, config.num_heads * config.head_dim, hidden, config.intermediate_size]
        inputs = inputs * config.num_layers + [hidden] * len(ends) + [2 * hidden] * checkpoint.reads_features
        return ["q8_0" if n % Q8_0_INPUTS == 0 else fallback for n in inputs]
    linears = [
        [f"{layout.layers}.{i}.{name}" for name in parts.values()]
        for i in range(config.num_layers)
        for parts in layout.linears
    ]
    linears += ends
    if checkpoint.reads_features:
        linears.append([FEATURES.removesuffix(".weight")])
    if keep == "dtype" or not isinstance(checkpoint.weights, GGUFFile):
        return [fallback] * len(linears)
    return [common_block_type(checkpoint.weights, names) or fallback for names in linears]


def common_block_type(file: GGUFFile, names: Sequence[str]) -> str | None:
    """The block type in which all of these weights are stored, None if they differ or it is another type."""
    types = {file.stored(f"{name}.weight")[0].lower() for name in names}
    common = types.pop()
    return common if not types and common in BLOCK_TYPES else None


def type_name(dtype: torch.dtype) -> str:
    """How the extension calls a dtype."""
    return str(dtype).removeprefix("torch.")
