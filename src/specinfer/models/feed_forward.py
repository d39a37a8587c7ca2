"""The feed-forward half of a layer, plain and gated, and its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specinfer.models.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[n, columns] -> the same shape."""


@dataclass(frozen=True)
class FeedForward:
    """out(activation(inner(x)))."""

    inner: Linear
    activation: Activation
    out: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.activation(self.inner(x)))


@dataclass(frozen=True)
class GatedFeedForward:
    """SwiGLU (Shazeer, arXiv 2002.05202). gate_up: both weights side by side."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).tensor_split(2, -1)
        return self.down(silu(gate).mul_(up))


def silu(x: torch.Tensor) -> torch.Tensor:
    return by_rows(F.silu, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh formula, which Hugging Face calls gelu_new."""
    return by_rows(lambda rows: F.gelu(rows, approximate="tanh"), x)


def by_rows(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """Each row of [n, columns] as if it were alone: beyond 32768 elements torch would split the work where it
    likes, and the ends of its parts are computed by other code than their middles."""
    rows = max(1, 32767 // x.shape[1])
    if x.shape[0] <= rows:
        return activation(x)
    return torch.cat([activation(x[i : i + rows]) for i in range(0, x.shape[0], rows)])
