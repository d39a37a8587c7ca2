"""AttentionBackend: what a model file sees of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specinfer.attention.span import Span


class AttentionBackend(Protocol):
    """Every backend equals TorchAttention within the tolerance that it states."""

    def plan(self, spans: Sequence[Span]) -> None:
        """Prepare one forward; the spans' tokens are flattened in this order."""
        ...

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to their slots, then attend.

        q: [num_tokens, num_heads, head_dim]; the result has its shape and dtype.
        """
        ...
