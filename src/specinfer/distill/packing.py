"""Packing: a trained draft as one GGUF file in 8 bits, about half as large, to be shipped."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from specinfer.errors import ConfigError
from specinfer.models.config import ModelConfig
from specinfer.models.loader import Checkpoint, open_checkpoint
from specinfer.models.weights import FEATURES

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def pack(directory: Path, file: Path) -> None:
    """directory: a draft that `specinfer distill` made. Matrices are kept in Q8_0, which is what the native
    forward would make of them, vectors in fp32. Raises ConfigError or ModelError."""
    draft = open_checkpoint(directory)
    config = draft.config
    if config.model_type != "llama" or config.rope is None or config.rope.kind != "default":
        raise ConfigError(
            f"{directory} is a {config.model_type} with positions that are not packed",
            hint="name a draft that specinfer distill made; with scaled positions, ship the directory",
        )
    writer = gguf.GGUFWriter(file, "llama")
    write_config(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name in draft.weights.names():
        values = ordered(draft, name).numpy()
        kind = F32 if values.ndim == 1 else Q8_0
        stored = name if name == FEATURES else names.get_name(name, (".weight",))
        writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    vocab = draft.draft_vocab
    if vocab is None and draft.reads_features:  # without an embedding, nothing else says how many there are
        vocab = np.arange(config.vocab_size)
    if vocab is not None:
        writer.add_tensor("d2t", vocab.astype(np.int32))
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
    values = draft.weights.get(name).float()
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    halves = values.view(-1, 2, draft.config.head_dim // 2, values.shape[1])
    return halves.transpose(1, 2).reshape(values.shape).contiguous()
