"""How the weights of a native model are kept: one type for every packed linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from specinfer.models.gguf import GGUFFile
from specinfer.models.loader import Checkpoint

Keep = Literal["dtype", "stored", "int8"]
"""All in a dtype; in the blocks that a GGUF stores; in Q8_0. Where the last two do not go: the dtype."""

LAYER_PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FUSED = (("q", "k", "v"), ("out",), ("gate", "up"), ("down",))
"""The parts that share a packed linear, in the order in which the extension wants their types."""
BLOCK_TYPES = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
"""GGUF's that the extension multiplies as they are."""
Q8_0_INPUTS = 32


def linear_types(checkpoint: Checkpoint, keep: Keep, dtype: torch.dtype) -> list[str]:
    """The type of every packed linear: each layer's, the head and, unless it is tied, the embedding."""
    config = checkpoint.config
    fallback = type_name(dtype)
    num_ends = 1 if config.tie_embeddings else 2
    if keep == "int8":
        inputs = [config.hidden_size, config.num_heads * config.head_dim, config.hidden_size]
        inputs = [*inputs, config.intermediate_size] * config.num_layers + [config.hidden_size] * num_ends
        return ["q8_0" if n % Q8_0_INPUTS == 0 else fallback for n in inputs]
    linears = [
        [f"model.layers.{i}.{LAYER_PARTS[part]}" for part in parts]
        for i in range(config.num_layers)
        for parts in FUSED
    ]
    linears += [[name] for name in ("lm_head", "model.embed_tokens")[-num_ends:]]
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
