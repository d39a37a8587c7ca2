"""ModelConfig: a checkpoint's architecture, whatever its family calls the parts of it."""

from __future__ import annotations

from dataclasses import dataclass

from specinfer.errors import ModelError
from specinfer.models.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a decoder.

    max_position: positions that the checkpoint can tell apart. windows: per layer the number of last
    positions that a token sees, itself included, None for all. rope: None where positions are learned.
    embedding_size: columns of the embedding and the head, where they are projected. norm_first: whether a
    layer normalises what goes into its parts, else what comes out.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_position: int
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig | None
    embedding_size: int
    norm_first: bool = True

    def check(self, source: str) -> ModelConfig:
        """The same config. Raises ModelError for shapes that no model has."""
        sizes = (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.vocab_size)
        if min(sizes) < 1 or self.num_heads % self.num_kv_heads or (self.rope and self.head_dim % 2):
            raise ModelError(
                f"{source}: impossible shape: {self.num_heads} heads, {self.num_kv_heads} K/V heads"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"{source}: sliding_window must be positive")
        return self
