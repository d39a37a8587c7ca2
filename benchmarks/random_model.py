"""A random Llama of a given size: for speed where no checkpoint can be had."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZES = {"100m": (768, 12, 2048), "1b": (2048, 16, 5632)}


def random_model(size: str, max_position: int = 2048) -> str:
    """A random Llama of about `size` parameters in a temporary directory."""
    hidden, layers, ff = SIZES[size]
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": ff,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64, "max_position_embeddings": max_position, "tie_word_embeddings": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(config))
    weights = {
        "model.embed_tokens.weight": torch.randn(32000, hidden, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    kv = hidden // 256 * 64
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (ff, hidden), "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
    }  # fmt: skip
    for i in range(layers):
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.{name}.weight"] = (
                torch.randn(shape, dtype=torch.bfloat16) / shape[1] ** 0.5
            )
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(weights, str(directory / "model.safetensors"))
    return str(directory)
