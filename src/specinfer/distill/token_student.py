"""TokenStudent: a small Llama that reads tokens, and begins as its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.distill.batches import MicroBatch
from specinfer.distill.inheritance import has_llama_layers, inherit
from specinfer.distill.shape import Shape
from specinfer.distill.student import Student, llama_settings
from specinfer.models.loader import Checkpoint

ROPE_THETA = 10_000.0


class TokenStudent(Student):
    """A transformers LlamaForCausalLM with tied embeddings: it reads what it speaks, and every other token as
    its first."""

    def __init__(self, model: Any, vocab: NDArray[np.int64] | None, target_vocab_size: int) -> None:
        super().__init__(model, vocab, target_vocab_size)
        self.fed_ids = np.maximum(self.draft_ids, 0)

    @staticmethod
    def fresh(
        shape: Shape,
        vocab: NDArray[np.int64] | None,
        target: Checkpoint,
        states: Sequence[torch.Tensor],
        seed: int,
    ) -> TokenStudent:
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
        return TokenStudent(model, vocab, target.config.vocab_size)

    @staticmethod
    def further(checkpoint: Checkpoint, target: Checkpoint) -> TokenStudent:
        """Go on from what `open_draft` opened. Raises ConfigError, see `llama_settings`."""
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**llama_settings(checkpoint)))
        state = {name: checkpoint.weights.get(name).float() for name in checkpoint.weights.names()}
        if checkpoint.config.tie_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        return TokenStudent(model, checkpoint.draft_vocab, target.config.vocab_size)

    def logits(self, batch: MicroBatch) -> torch.Tensor:
        hidden = self.model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden.flatten(0, 1).index_select(0, batch.rows))
        return logits

    def state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.model.state_dict()
        if self.model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        return state
