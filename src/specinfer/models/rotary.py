"""Rotary position embedding (Su et al., arXiv 2104.09864), halves rotated as in Hugging Face checkpoints."""

from __future__ import annotations

import torch

from specinfer.models.rope import RopeConfig

CosSin = tuple[torch.Tensor, torch.Tensor]


class Rotary:
    """Tables of cosines and sines by position."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(max_position).float(), rope.frequencies(head_dim, max_position))
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        # The sign of the rotated first half is folded into the sine.
        self._cos = torch.cat([cos, cos], -1).to(dtype)
        self._sin = torch.cat([-sin, sin], -1).to(dtype)
        self._half = head_dim // 2

    def to(self, device: torch.device) -> Rotary:
        """Move the tables."""
        self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self

    def at(self, positions: torch.Tensor) -> CosSin:
        """positions: [n] -> cos, sin, each [n, 1, head_dim]."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]

    def rotate(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """x: [n, heads, head_dim], rotated by its rows' positions."""
        cos, sin = cos_sin
        swapped = torch.cat((x[..., self._half :], x[..., : self._half]), -1)
        return (x * cos).add_(swapped.mul_(sin))
