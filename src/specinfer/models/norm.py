"""Normalisation of rows, each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Norm = Callable[[torch.Tensor], torch.Tensor]
"""[..., size] -> the same shape."""


@dataclass(frozen=True)
class RMSNorm:
    """weight: [size]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """weight, bias: [size]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
