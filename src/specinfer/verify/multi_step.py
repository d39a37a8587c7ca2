"""Multi-step speculative sampling: SpecInfer's verifier (Miao et al., ASPLOS 2024, 4.3, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.tree import CandidateKind, TokenTree
from specinfer.verify.coin import Coin
from specinfer.verify.law import DraftLaw
from specinfer.verify.rejection import reject_or_accept
from specinfer.verify.verdict import Verdict


def multi_step(tree: TokenTree, law: DraftLaw, p: NDArray[np.float64], coin: Coin) -> Verdict:
    """Exact for IID candidates, each really drawn from its drafter's q, and for DETERMINISTIC ones.

    p: [num_nodes, V], the target's law after each node; law: q, [V], for every (drafter, parent) that drew.
    At a node, candidate x of drafter s passes with probability p(x) / q_s(x); else p becomes
    norm(max(p - q_s, 0)) and the next is tried. Raises ValueError for a WITHOUT_REPLACEMENT candidate.
    """

    def proposal(node: int, drafter: int, drawn: Sequence[int]) -> NDArray[np.float64]:
        return law[drafter, node]

    return reject_or_accept(tree, p, coin, CandidateKind.IID, proposal)
