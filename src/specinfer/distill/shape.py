"""From a size to the shape of a draft: one rule for all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specinfer.errors import ConfigError

HEAD_DIM = 64
MIN_LAYERS = 3
SLACK = 1.05
"""A draft may exceed the size asked for by this factor."""


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings: two heads share K/V, the feed-forward is three times as wide.

    The size decides: as wide as three layers allow, then as deep as the rest allows. A draft runs its layers
    one after the other at every depth of a tree, so few and wide ones are preferred.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    head_dim: int = HEAD_DIM

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // 2 if self.num_heads % 2 == 0 else self.num_heads

    @property
    def intermediate_size(self) -> int:
        return 3 * self.hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Of one layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Of embedding (the head is the same), layers and last norm."""
        return (self.vocab_size + 1) * self.hidden_size + self.num_layers * self.num_layer_parameters


def shape_of(size: int, vocab_size: int, head_dim: int = HEAD_DIM) -> Shape:
    """The shape for about `size` parameters. Raises ConfigError where no such draft has room for its head."""
    limit = int(size * SLACK)
    smallest = Shape(vocab_size, head_dim, MIN_LAYERS, head_dim).num_parameters
    if smallest > limit:
        raise ConfigError(
            f"a size of {size:,} parameters fits no head of {vocab_size} tokens: the smallest draft has "
            f"{smallest:,}",
            hint="raise --size or lower --vocab",
        )
    hidden = head_dim
    while Shape(vocab_size, hidden + head_dim, MIN_LAYERS, head_dim).num_parameters <= limit:
        hidden += head_dim
    one = Shape(vocab_size, hidden, 1, head_dim)
    num_layers = 1 + (limit - one.num_parameters) // one.num_layer_parameters
    return Shape(vocab_size, hidden, num_layers, head_dim)


def parse_size(text: str) -> int:
    """ "7m" -> 7,000,000. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)m", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"size must be millions of parameters, got {text!r}", hint='for example "7m"')
    return round(float(match[1]) * 1e6)
