"""ModelConfig: a checkpoint's architecture, read from Hugging Face keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specinfer.errors import ModelError

SUPPORTED_MODEL_TYPES = ("llama",)
REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear or llama3; `freq_factors` divide the frequencies (GGUF)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_factors: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a decoder. max_position: positions the checkpoint was made for."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    tie_embeddings: bool
    rope: RopeConfig

    @staticmethod
    def from_hf(raw: Mapping[str, Any], source: str) -> ModelConfig:
        """`raw` as in config.json; `source` names it in errors. Raises ModelError."""
        model_type = read(raw, "model_type", source, str)
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise ModelError(
                f"{source}: model type {model_type!r} is not supported",
                hint=f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}",
            )
        activation = read(raw, "hidden_act", source, str, "silu")
        if activation != "silu":
            raise ModelError(f"{source}: activation {activation!r} is not supported for {model_type}")
        if "quantization_config" in raw:
            raise ModelError(
                f"{source}: quantised safetensors are not supported",
                hint="use a GGUF file or an unquantised one",
            )
        num_heads = read(raw, "num_attention_heads", source, int)
        hidden_size = read(raw, "hidden_size", source, int)
        config = ModelConfig(
            model_type=model_type,
            vocab_size=read(raw, "vocab_size", source, int),
            hidden_size=hidden_size,
            num_layers=read(raw, "num_hidden_layers", source, int),
            num_heads=num_heads,
            num_kv_heads=read(raw, "num_key_value_heads", source, int, num_heads),
            head_dim=read(raw, "head_dim", source, int, hidden_size // max(1, num_heads)),
            intermediate_size=read(raw, "intermediate_size", source, int),
            rms_norm_eps=read(raw, "rms_norm_eps", source, float, 1e-6),
            max_position=read(raw, "max_position_embeddings", source, int, 2048),
            tie_embeddings=read(raw, "tie_word_embeddings", source, bool, False),
            rope=read_rope(raw, source),
        )
        sizes = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size)
        if min(sizes) < 1 or config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise ModelError(
                f"{source}: impossible shape: {config.num_heads} heads, {config.num_kv_heads} K/V heads"
            )
        return config


def read_rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = raw.get("rope_parameters") or {
        **(raw.get("rope_scaling") or {}),
        "rope_theta": raw.get("rope_theta"),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"{source}: rope type {kind!r} is not supported", hint="supported: default, linear, llama3"
        )
    return RopeConfig(
        theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_max_position=int(rope.get("original_max_position_embeddings") or 8192),
        freq_factors=rope.get("freq_factors"),
    )


def read(raw: Mapping[str, Any], key: str, source: str, kind: type, default: Any = REQUIRED) -> Any:
    """A config value of the right type, or a ModelError that names the key. null counts as absent."""
    value = raw.get(key)
    if value is None:
        if default is REQUIRED:
            raise ModelError(f"{source}: {key} is missing", hint="is this a decoder's config.json?")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelError(f"{source}: {key} should be {kind.__name__}, got {value!r}")
    return value
