"""Llama (Touvron et al., arXiv 2302.13971 and later): RMSNorm, rotary, grouped queries, SwiGLU.

A model sees (token ids, positions, attention): no mask, no tree, no cache enters this file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specinfer.attention import AttentionBackend
from specinfer.models.config import ModelConfig
from specinfer.models.linear import LinearFactory
from specinfer.models.rotary import Rotary
from specinfer.models.weights import WeightSource

CosSin = tuple[torch.Tensor, torch.Tensor]


def find(weights: WeightSource, name: str) -> torch.Tensor | None:
    """A tensor that a checkpoint may lack."""
    return weights.get(name) if name in weights.names() else None


class LlamaLayer:
    """Attention and feed-forward of one layer."""

    def __init__(
        self, index: int, config: ModelConfig, weights: WeightSource, factory: LinearFactory, rotary: Rotary
    ) -> None:
        name = f"model.layers.{index}"

        def fused(*parts: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
            return [weights.get(f"{name}.{p}.weight") for p in parts], [
                find(weights, f"{name}.{p}.bias") for p in parts
            ]

        self._index = index
        self._config = config
        self._rotary = rotary
        self._input_norm = factory.table(weights.get(f"{name}.input_layernorm.weight"))
        self._post_norm = factory.table(weights.get(f"{name}.post_attention_layernorm.weight"))
        self._qkv = factory.linear(*fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        self._out = factory.linear(*fused("self_attn.o_proj"))
        self._gate_up = factory.linear(*fused("mlp.gate_proj", "mlp.up_proj"))
        self._down = factory.linear(*fused("mlp.down_proj"))

    def __call__(self, hidden: torch.Tensor, cos_sin: CosSin, attention: AttentionBackend) -> torch.Tensor:
        """hidden: [n, hidden_size] -> the same."""
        c = self._config
        num_qk = c.num_heads + c.num_kv_heads
        x = F.rms_norm(hidden, (c.hidden_size,), self._input_norm, c.rms_norm_eps)
        qkv = self._qkv(x).view(-1, num_qk + c.num_kv_heads, c.head_dim)
        qk = self._rotary.rotate(qkv[:, :num_qk], cos_sin)
        attended = attention.run(qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, num_qk:], self._index)
        hidden = hidden + self._out(attended.reshape(-1, c.num_heads * c.head_dim))
        x = F.rms_norm(hidden, (c.hidden_size,), self._post_norm, c.rms_norm_eps)
        gate, up = self._gate_up(x).tensor_split(2, -1)
        return hidden + self._down(F.silu(gate).mul_(up))


class Llama:
    """A Llama decoder, run layer by layer by a ModelRunner."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, factory: LinearFactory, max_position: int
    ) -> None:
        self.config = config
        self._rotary = Rotary(config.rope, config.head_dim, max_position, factory.dtype).to(factory.device)
        embedding = weights.get("model.embed_tokens.weight")
        self._embedding = factory.table(embedding)
        self.layers = [
            LlamaLayer(i, config, weights, factory, self._rotary) for i in range(config.num_layers)
        ]
        self._norm = factory.table(weights.get("model.norm.weight"))
        head = embedding if config.tie_embeddings else weights.get("lm_head.weight")
        self._head = factory.linear([head], [find(weights, "lm_head.bias")])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, hidden_size]."""
        return self._embedding.index_select(0, token_ids)

    def positions(self, positions: torch.Tensor) -> CosSin:
        """What the layers need of the positions [n], shared by all of them."""
        return self._rotary.at(positions)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> logits [rows, vocab_size]."""
        c = self.config
        return self._head(F.rms_norm(hidden, (c.hidden_size,), self._norm, c.rms_norm_eps))
