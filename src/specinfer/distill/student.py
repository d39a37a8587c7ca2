"""Student: the small Llama that is trained, and how it becomes a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from specinfer.distill.inheritance import has_llama_layers, inherit
from specinfer.distill.shape import Shape
from specinfer.distill.storage import make_directory, write_whole
from specinfer.distill.vocabulary import draft_ids
from specinfer.errors import ConfigError
from specinfer.models.loader import DRAFT_VOCAB_FILE, Checkpoint, open_checkpoint

ROPE_THETA = 10_000.0


class Student:
    """A transformers LlamaForCausalLM on `vocab`, a subset of the target's vocabulary (None: all of it), in
    its embedding and its head alike."""

    def __init__(self, model: Any, vocab: NDArray[np.int64] | None, target_vocab_size: int) -> None:
        self.model = model
        self.vocab = vocab
        self.draft_ids = draft_ids(vocab, target_vocab_size)

    @staticmethod
    def fresh(
        shape: Shape,
        vocab: NDArray[np.int64] | None,
        target: Checkpoint,
        states: Sequence[torch.Tensor],
        seed: int,
    ) -> Student:
        """Of random weights, a seed's, except where it inherits the target's; states: see `inherit`."""
        from transformers import LlamaConfig, LlamaForCausalLM

        rope = target.config.rope if has_llama_layers(target.config) else None
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=target.config.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": rope.theta if rope else ROPE_THETA},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        inherit(model, target, vocab, states)
        return Student(model, vocab, target.config.vocab_size)

    @staticmethod
    def from_directory(path: Path, target: Checkpoint) -> Student:
        """Go on from a draft's checkpoint. Raises ConfigError or ModelError for what is none."""
        from transformers import LlamaConfig, LlamaForCausalLM

        checkpoint = open_checkpoint(path)
        vocab, size = checkpoint.draft_vocab, target.config.vocab_size
        if not path.is_dir() or (vocab is not None and not checkpoint.embeds_draft_vocab):
            raise ConfigError(
                f"cannot train {path} further",
                hint="give a directory of weights whose embedding and head have the same tokens",
            )
        if (vocab is None and checkpoint.config.vocab_size != size) or (
            vocab is not None and vocab.max() >= size
        ):
            raise ConfigError(
                f"{path} is no draft for this target: its vocabulary is another",
                hint="start from a draft made for it, or from none",
            )
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(str(path), local_files_only=True))
        state = {name: checkpoint.weights.get(name).float() for name in checkpoint.weights.names()}
        if checkpoint.config.tie_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        return Student(model, vocab, size)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logits(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """token_ids: [texts, length] draft ids, padded on the right; rows: indices into the flattened tokens.
        -> [rows, draft vocabulary], the logits after these tokens."""
        hidden = self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden.flatten(0, 1).index_select(0, rows))
        return logits

    def save(self, directory: Path) -> None:
        """bf16 weights in the Hugging Face layout. Raises SpecinferError where the disk is full."""
        make_directory(directory)
        state = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.model.state_dict().items()
            if not (name == "lm_head.weight" and self.model.config.tie_word_embeddings)
        }
        self.model.config.dtype = torch.bfloat16
        write_whole(directory / "model.safetensors", safetensors.torch.save(state, {"format": "pt"}))
        if self.vocab is not None:
            d2t = {"d2t": torch.from_numpy(self.vocab).to(torch.int32)}
            write_whole(directory / DRAFT_VOCAB_FILE, safetensors.torch.save(d2t))
        write_whole(directory / "config.json", self.model.config.to_json_string().encode())
