"""EnsembleDrafter: several drafters on one context, their trees merged (SpecInfer, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specinfer.draft.drafter import DraftContext, Drafter, Proposal
from specinfer.tree import CandidateKind, TokenTree, Topology, merge
from specinfer.verify.verdict import Verdict


class EnsembleDrafter:
    """Any mix of drafters. Each may use its share of a request's nodes."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        assert drafters, "an ensemble needs members"
        self._drafters = tuple(drafters)

    @property
    def kinds(self) -> frozenset[CandidateKind]:
        return frozenset().union(*(d.kinds for d in self._drafters))

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[object]:
        n = len(self._drafters)
        # What does not divide goes to the first ones.
        shares = [
            [replace(c, max_nodes=1 + (c.max_nodes - 1 + n - 1 - i) // n) for c in contexts] for i in range(n)
        ]
        return [d.launch(share, topology) for d, share in zip(self._drafters, shares, strict=True)]

    def collect(self, handle: list[object]) -> list[Proposal]:
        proposals = [d.collect(h) for d, h in zip(self._drafters, handle, strict=True)]
        return [merge_proposals(each) for each in zip(*proposals, strict=True)]

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        for drafter in self._drafters:
            drafter.observe(trees, verdicts)


def merge_proposals(proposals: Sequence[Proposal]) -> Proposal:
    """Merge the trees, and file the laws under the merged drafter numbers and nodes."""
    tree = merge([p.tree for p in proposals])
    law: dict[tuple[int, int], NDArray[np.float64]] = {}
    if any(p.law for p in proposals):
        num_drafters = 0
        for proposal in proposals:
            for (drafter, node), q in proposal.law.items():
                law[drafter + num_drafters, tree.places[proposal.tree.path_tokens(node)]] = q
            num_drafters += 1 + max((c.drafter for c in proposal.tree.candidates), default=0)
    return Proposal(tree, law)
