"""Batch: work items flattened into one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specinfer.attention import Span

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class WorkItem:
    """One request's part of a forward: a trunk of known tokens with a tree below its last one.

    token_ids: [num_tokens], in the order of the span; logits_rows: the tokens whose logits are wanted.
    """

    span: Span
    token_ids: Ints
    logits_rows: Ints


@dataclass(frozen=True)
class Batch:
    """Flattened over items: token_ids [num_tokens]; logits_rows indexes them."""

    spans: tuple[Span, ...]
    token_ids: Ints
    logits_rows: Ints

    @cached_property
    def slots(self) -> Ints:
        """[num_tokens], where their K/V goes."""
        return np.concatenate([span.slots for span in self.spans])

    @cached_property
    def positions(self) -> Ints:
        """[num_tokens], absolute."""
        return np.concatenate([len(span.context_slots) + span.depths() for span in self.spans])

    @staticmethod
    def of(items: Sequence[WorkItem]) -> Batch:
        """Concatenate in order."""
        if len(items) == 1:
            return Batch((items[0].span,), items[0].token_ids, items[0].logits_rows)
        starts = accumulate((item.span.num_tokens for item in items), initial=0)
        return Batch(
            tuple(item.span for item in items),
            np.concatenate([item.token_ids for item in items]),
            np.concatenate([start + item.logits_rows for start, item in zip(starts, items, strict=False)]),
        )


def trunk_and_tree(trunk_len: int, tree_parents: Ints) -> Ints:
    """Span parents of a trunk whose last token is the tree's root: [trunk_len + len(tree_parents) - 1]."""
    if trunk_len == 1:
        return tree_parents
    return np.concatenate([np.arange(-1, trunk_len - 1), tree_parents[1:] + trunk_len - 1])
