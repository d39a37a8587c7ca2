"""The attention half of a layer: projections around whatever backend attends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specinfer.attention import AttentionBackend
from specinfer.models.linear import Linear
from specinfer.models.norm import Norm
from specinfer.models.rotary import CosSin, Rotary


@dataclass(frozen=True)
class SelfAttention:
    """qkv: the three weights side by side. rotary: None where positions are learned. head_norms: of each head
    of q and of k, before it is rotated, None for none."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    out: Linear
    rotary: Rotary | None = None
    head_norms: tuple[Norm, Norm] | None = None

    def __call__(self, x: torch.Tensor, cos_sin: CosSin | None, attention: AttentionBackend) -> torch.Tensor:
        """x: [n, hidden_size] -> the same."""
        num_q, num_qk = self.num_heads, self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(-1, num_qk + self.num_kv_heads, self.head_dim)
        qk = qkv[:, :num_qk]
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            qk = torch.cat([q_norm(qk[:, :num_q]), k_norm(qk[:, num_q:])], 1)
        if self.rotary is not None:
            assert cos_sin is not None
            qk = self.rotary.rotate(qk, cos_sin)
        attended = attention.run(qk[:, :num_q], qk[:, num_q:], qkv[:, num_qk:], self.layer)
        return self.out(attended.reshape(-1, num_q * self.head_dim))
