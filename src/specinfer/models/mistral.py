"""Mistral (Jiang et al., arXiv 2310.06825): Llama with a sliding window, of late without it again."""

from __future__ import annotations

from dataclasses import replace

from specinfer.models import llama
from specinfer.models.config import ModelConfig
from specinfer.models.family import Family
from specinfer.models.raw import RawConfig


def read_config(raw: RawConfig) -> ModelConfig:
    raw.expect(layer_types=None)
    window = raw.read("sliding_window", int, None) if "sliding_window" in raw.values else 4096
    config = llama.read_config(raw)
    return replace(config, windows=(window,) * config.num_layers)


FAMILY = Family(read_config, llama.build, llama.PREFIX, llama.LAYERS, llama.EMBEDDING)
