"""Llama (Touvron et al., arXiv 2302.13971 and later): RMSNorm, rotary, grouped queries, SwiGLU.

A model sees (token ids, positions, attention): no mask, no tree, no cache enters this file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from specinfer.attention import AttentionBackend
from specinfer.models.config import ModelConfig
from specinfer.models.linear import Linear, LinearFactory
from specinfer.models.rotary import Rotary
from specinfer.models.weights import WeightSource, find, take

CosSin = tuple[torch.Tensor, torch.Tensor]


class LlamaLayer:
    """Attention and feed-forward of one layer."""

    def __init__(
        self, index: int, config: ModelConfig, weights: WeightSource, factory: LinearFactory, rotary: Rotary
    ) -> None:
        c = config
        name = f"model.layers.{index}"
        num_q, num_kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def linear(parts: Mapping[str, int], in_features: int) -> Linear:
            return factory.linear(
                [take(weights, f"{name}.{part}.weight", rows, in_features) for part, rows in parts.items()],
                [find(weights, f"{name}.{part}.bias", rows) for part, rows in parts.items()],
            )

        def norm(part: str) -> torch.Tensor:
            return factory.table(take(weights, f"{name}.{part}.weight", c.hidden_size))

        self._index = index
        self._config = config
        self._rotary = rotary
        self._input_norm = norm("input_layernorm")
        self._post_norm = norm("post_attention_layernorm")
        self._qkv = linear(
            {"self_attn.q_proj": num_q, "self_attn.k_proj": num_kv, "self_attn.v_proj": num_kv}, c.hidden_size
        )
        self._out = linear({"self_attn.o_proj": c.hidden_size}, num_q)
        self._gate_up = linear(
            {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}, c.hidden_size
        )
        self._down = linear({"mlp.down_proj": c.hidden_size}, c.intermediate_size)

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
        return hidden + self._down(silu(gate).mul_(up))


def silu(x: torch.Tensor) -> torch.Tensor:
    """silu of [n, columns], each row as if it were alone: beyond 32768 elements torch would split the work
    where it likes, and the ends of its parts are computed by other code than their middles."""
    rows = max(1, 32767 // x.shape[1])
    if x.shape[0] <= rows:
        return F.silu(x)
    return torch.cat([F.silu(x[i : i + rows]) for i in range(0, x.shape[0], rows)])


class Llama:
    """A Llama decoder, run layer by layer by a ModelRunner."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        factory: LinearFactory,
        max_position: int,
        head_size: int,
    ) -> None:
        """head_size: rows of the head, fewer than config.vocab_size in a draft on a subset."""
        self.config = config
        self._rotary = Rotary(config.rope, config.head_dim, max_position, factory.dtype).to(factory.device)
        embedding = take(weights, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = factory.table(embedding)
        self.layers = [
            LlamaLayer(i, config, weights, factory, self._rotary) for i in range(config.num_layers)
        ]
        self._norm = factory.table(take(weights, "model.norm.weight", config.hidden_size))
        head_name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        head = take(weights, head_name, head_size, config.hidden_size)
        self._head = factory.linear([head], [find(weights, "lm_head.bias", head_size)])

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
