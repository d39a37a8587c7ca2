"""The model families written here, by the `model_type` of their checkpoints."""

from __future__ import annotations

from specinfer.models import gpt2, llama, mistral, opt, qwen2, qwen3
from specinfer.models.family import Family

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "opt": opt.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}
SUPPORTED_MODEL_TYPES = tuple(FAMILIES)
