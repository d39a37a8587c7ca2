"""Qwen3 (arXiv 2505.09388): Llama with a norm of every head of q and k, and Qwen2's windows."""

from __future__ import annotations

from specinfer.models import llama, qwen2
from specinfer.models.builder import Builder
from specinfer.models.decoder import Decoder
from specinfer.models.family import Family


def build(b: Builder) -> Decoder:
    return llama.build(b, head_norms=("q_norm", "k_norm"))


FAMILY = Family(qwen2.read_config, build, llama.PREFIX, llama.LAYERS, llama.EMBEDDING)
