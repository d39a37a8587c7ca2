"""Packing: a trained draft as one GGUF file in 8 bits, about half as large, to be shipped."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from specinfer.errors import ConfigError
from specinfer.models.config import ModelConfig
from specinfer.models.loader import Checkpoint, open_checkpoint

LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def pack(directory: Path, file: Path) -> None:
    """directory: a draft that `specinfer distill` made. Matrices are kept in Q8_0, which is what the native
    forward would make of them, vectors in fp32. Raises ConfigError or ModelError."""
    draft = open_checkpoint(directory)
    config = draft.config
    if config.model_type != "llama" or config.rope is None or config.rope.kind != "default":
        raise ConfigError(f"{directory} is no draft of ours", hint="name one that specinfer distill made")
    writer = gguf.GGUFWriter(file, "llama")
    write_config(writer, config)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    if not config.tie_embeddings:
        names["lm_head"] = "output"
    for i in range(config.num_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    for ours, theirs in names.items():
        values = ordered(draft, ours).numpy()
        if values.ndim == 1:
            writer.add_tensor(f"{theirs}.weight", values)
        else:
            writer.add_tensor(f"{theirs}.weight", gguf.quantize(values, Q8_0), raw_dtype=Q8_0)
    if draft.draft_vocab is not None:
        writer.add_tensor("d2t", draft.draft_vocab.astype(np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """What GGUFFile.config reads."""
    assert config.rope is not None
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)


def ordered(draft: Checkpoint, name: str) -> torch.Tensor:
    """A weight in fp32, in GGUF's order: rotary pairs of q and k adjacent."""
    values = draft.weights.get(f"{name}.weight").float()
    if name.rpartition(".")[2] not in ("q_proj", "k_proj"):
        return values
    halves = values.view(-1, 2, draft.config.head_dim // 2, values.shape[1])
    return halves.transpose(1, 2).reshape(values.shape).contiguous()
