"""Decoder: the shape that every family's model has, run layer by layer by a ModelRunner.

A model sees (token ids, positions, attention): no mask, no tree, no cache enters this room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specinfer.attention import AttentionBackend
from specinfer.models.config import ModelConfig
from specinfer.models.norm import Norm
from specinfer.models.rotary import CosSin, Rotary
from specinfer.models.self_attention import SelfAttention

Rows = Callable[[torch.Tensor], torch.Tensor]
"""[n, in_features] -> [n, out_features], row by row."""
Layer = Callable[[torch.Tensor, CosSin | None, AttentionBackend], torch.Tensor]
"""(hidden, what the positions give, attention) -> hidden, [n, hidden_size]."""


@dataclass(frozen=True)
class PreNormLayer:
    """Normalises what goes into its halves."""

    attention_norm: Norm
    attention: SelfAttention
    feed_forward_norm: Norm
    feed_forward: Rows

    def __call__(
        self, hidden: torch.Tensor, cos_sin: CosSin | None, attention: AttentionBackend
    ) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos_sin, attention)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


@dataclass(frozen=True)
class PostNormLayer:
    """Normalises what comes out of its halves."""

    attention_norm: Norm
    attention: SelfAttention
    feed_forward_norm: Norm
    feed_forward: Rows

    def __call__(
        self, hidden: torch.Tensor, cos_sin: CosSin | None, attention: AttentionBackend
    ) -> torch.Tensor:
        hidden = self.attention_norm(hidden + self.attention(hidden, cos_sin, attention))
        return self.feed_forward_norm(hidden + self.feed_forward(hidden))


@dataclass(frozen=True)
class Decoder:
    """Positions come in through `rotary` or, learned, through `embed`."""

    config: ModelConfig
    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(token ids [n], positions [n]) -> [n, hidden_size]."""
    layers: Sequence[Layer]
    head: Rows
    """[rows, hidden_size] -> logits [rows, vocab_size]."""
    rotary: Rotary | None = None

    def cos_sin(self, positions: torch.Tensor) -> CosSin | None:
        """What the layers need of the positions [n], shared by all of them."""
        return None if self.rotary is None else self.rotary.at(positions)


def compose(*parts: Rows | None) -> Rows:
    """One after the other, without those that are None."""
    present = [part for part in parts if part is not None]

    def run(x: torch.Tensor) -> torch.Tensor:
        for part in present:
            x = part(x)
        return x

    return run
