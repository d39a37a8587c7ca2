"""Qwen2 (arXiv 2407.10671): Llama with biases on q, k and v, and windows in its upper layers on request."""

from __future__ import annotations

from dataclasses import replace

from specinfer.errors import ModelError
from specinfer.models import llama
from specinfer.models.config import ModelConfig
from specinfer.models.family import Family
from specinfer.models.raw import RawConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_config(raw: RawConfig) -> ModelConfig:
    config = llama.read_config(raw)
    if not raw.read("use_sliding_window", bool, False):
        return config
    window = raw.read("sliding_window", int, None) if "sliding_window" in raw.values else 4096
    first = raw.read("max_window_layers", int, 28)
    n = config.num_layers
    types = raw.read("layer_types", list, [FULL] * min(n, first) + [SLIDING] * max(0, n - first))
    if len(types) != n or set(types) - {FULL, SLIDING}:
        raise ModelError(
            f"{raw.source}: layer_types {types} is not supported for {n} layers",
            hint=f"supported: {FULL} and {SLIDING}, one a layer",
        )
    return replace(config, windows=tuple(window if kind == SLIDING else None for kind in types))


FAMILY = Family(read_config, llama.build, llama.PREFIX, llama.LAYERS, llama.EMBEDDING)
