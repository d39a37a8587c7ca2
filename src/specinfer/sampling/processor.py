"""Processor: something that edits a row of logits by what came before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Processor(Protocol):
    """One of a request's own: it may remember what it learned of the request's history, which only grows."""

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        """Edit one row in place: [V] fp32, a column for each of the target's tokens.

        history: committed tokens, prompt and root included; path: tree tokens below the root. The row decides
        the token after them, and must come out the same whether a token is in the one or in the other.
        """
        ...
