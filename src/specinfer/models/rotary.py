"""Rotary position embedding (Su et al., arXiv 2104.09864), halves rotated as in Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch

from specinfer.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2], fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.freq_factors is not None:
        frequencies = frequencies / rope.freq_factors.float()
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_max_position / wavelengths - low) / (high - low)
        blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
        scaled = torch.where(
            wavelengths > rope.original_max_position / low, frequencies / rope.factor, frequencies
        )
        medium = (wavelengths <= rope.original_max_position / low) & (
            wavelengths >= rope.original_max_position / high
        )
        return torch.where(medium, blended, scaled)
    return frequencies


class Rotary:
    """Tables of cosines and sines by position."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope, head_dim))
        # The sign of the rotated first half is folded into the sine.
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        self._half = head_dim // 2

    def to(self, device: torch.device) -> Rotary:
        """Move the tables."""
        self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [n] -> cos, sin, each [n, 1, head_dim]."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]

    def rotate(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: [n, heads, head_dim], rotated by its rows' positions."""
        cos, sin = cos_sin
        swapped = torch.cat((x[..., self._half :], x[..., : self._half]), -1)
        return (x * cos).add_(swapped.mul_(sin))
