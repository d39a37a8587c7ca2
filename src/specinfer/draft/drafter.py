"""Drafter: anything that proposes token trees, model or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specinfer.sampling.row import Row
from specinfer.tree import CandidateKind, TokenTree, Topology
from specinfer.verify.law import DraftLaw
from specinfer.verify.verdict import Verdict


@dataclass(frozen=True)
class DraftContext:
    """One request as a drafter sees it.

    tokens: committed tokens, the last one the tree's root (a path not yet committed may be part of them).
    slots: [num_committed] slots of the leading tokens, by position; the root has none yet.
    row: the row that follows the root. max_depth, max_nodes: limits of the tree, root included in the nodes.
    notes: what drafters remember about the request, each under itself; they last as long as the request.
    """

    tokens: Sequence[int]
    slots: NDArray[np.int64]
    row: Row
    max_depth: int
    max_nodes: int
    notes: dict[Any, Any] = field(default_factory=dict)


class Proposal(NamedTuple):
    """law: the q rows of sampled candidates; empty when every candidate is deterministic."""

    tree: TokenTree
    law: DraftLaw


class Drafter(Protocol):
    """Proposes one tree per request; a request it cannot serve gets a root alone."""

    @property
    def kinds(self) -> frozenset[CandidateKind]:
        """The kinds of candidates it makes."""
        ...

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> object:
        """Start drafting; returns a handle, which says nothing to anyone but `collect`."""
        ...

    def collect(self, handle: Any) -> list[Proposal]:
        """One proposal per context, in their order."""
        ...

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        """What became of the last proposals."""
        ...
