"""Verification of draws without replacement: Sequoia's rule (Chen et al., arXiv 2402.12374, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.tree import CandidateKind, TokenTree
from specinfer.verify.coin import Coin
from specinfer.verify.law import DraftLaw
from specinfer.verify.rejection import reject_or_accept
from specinfer.verify.verdict import Verdict


def without_replacement(tree: TokenTree, law: DraftLaw, p: NDArray[np.float64], coin: Coin) -> Verdict:
    """Exact for WITHOUT_REPLACEMENT candidates, in the order of their draws, and for DETERMINISTIC ones.

    p: [num_nodes, V], the target's law after each node; law: q, [V], for every (drafter, parent) that drew,
    as it was before the first draw. A candidate's q is that without the drafter's earlier draws at the node,
    renormalised; the rest is as in `multi_step`. Raises ValueError for an IID candidate.
    """

    def proposal(node: int, drafter: int, drawn: Sequence[int]) -> NDArray[np.float64]:
        q = law[drafter, node]
        if not drawn:
            return q
        rest = q.copy()
        rest[list(drawn)] = 0.0
        total = rest.sum()
        return rest / total if total > 0.0 else rest

    return reject_or_accept(tree, p, coin, CandidateKind.WITHOUT_REPLACEMENT, proposal)
