"""Builder: what a family makes its decoder from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specinfer.models.config import ModelConfig
from specinfer.models.linear import Linear, LinearFactory
from specinfer.models.norm import LayerNorm, RMSNorm
from specinfer.models.rotary import Rotary
from specinfer.models.weights import WeightSource, find, take


@dataclass(frozen=True)
class Builder:
    """A config, its weights by name and the factory they go through; every method raises ModelError.

    max_position: positions that will be used. head_size: rows of the head, fewer than config.vocab_size in a
    draft on a subset.
    """

    config: ModelConfig
    weights: WeightSource
    factory: LinearFactory
    max_position: int
    head_size: int

    def linear(self, in_features: int, parts: Mapping[str, int], transposed: bool = False) -> Linear:
        """One layer for weights that share their input, outputs side by side, with the biases there are.

        parts: their names and output sizes. transposed: stored as [in_features, out_features].
        """
        matrices = []
        for name, rows in parts.items():
            shape = (in_features, rows) if transposed else (rows, in_features)
            matrix = take(self.weights, f"{name}.weight", *shape)
            matrices.append(matrix.T if transposed else matrix)
        biases = [find(self.weights, f"{name}.bias", rows) for name, rows in parts.items()]
        return self.factory.linear(matrices, biases)

    def table(self, name: str, *shape: int) -> torch.Tensor:
        """A weight that is looked up or multiplied elementwise."""
        return self.factory.table(take(self.weights, name, *shape))

    def rms_norm(self, name: str, size: int | None = None) -> RMSNorm:
        """size: of the rows, hidden_size unless given."""
        return RMSNorm(self.table(f"{name}.weight", size or self.config.hidden_size), self.config.norm_eps)

    def layer_norm(self, name: str) -> LayerNorm:
        size = self.config.hidden_size
        return LayerNorm(
            self.table(f"{name}.weight", size), self.table(f"{name}.bias", size), self.config.norm_eps
        )

    def head(self, embedding: str) -> Linear:
        """The head, or the embedding of this name where they are tied."""
        name = embedding if self.config.tie_embeddings else "lm_head"
        weight = take(self.weights, f"{name}.weight", self.head_size, self.config.embedding_size)
        return self.factory.linear([weight], [find(self.weights, "lm_head.bias", self.head_size)])

    def rotary(self) -> Rotary:
        """Tables for the positions that will be used."""
        c = self.config
        assert c.rope is not None
        return Rotary(c.rope, c.head_dim, self.max_position, self.factory.dtype).to(self.factory.device)
