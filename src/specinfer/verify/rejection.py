"""What the verifiers that accept or reject at random have in common: the walk, and one candidate's test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.tree import Candidate, CandidateKind, TokenTree
from specinfer.verify.coin import Coin
from specinfer.verify.verdict import Verdict

Proposal = Callable[[int, int, Sequence[int]], NDArray[np.float64]]
"""(parent node, drafter, tokens this drafter drew earlier at that node) -> [V], the law of its next draw."""


def reject_or_accept(
    tree: TokenTree, p: NDArray[np.float64], coin: Coin, sampled: CandidateKind, proposal: Proposal
) -> Verdict:
    """Walk down from the root while a candidate is accepted, then draw the last token from what is left of p.

    p: [num_nodes, V], the target's law after each node. Candidates are visited by (drafter, draw), the order
    they were drawn in; the order in which nodes are stored means nothing. A node that several candidates
    share is tried once for each. Raises ValueError for a candidate that is neither DETERMINISTIC nor of the
    `sampled` kind.
    """
    queues: dict[int, list[Candidate]] = {}
    for candidate in tree.candidates:
        if candidate.kind not in (CandidateKind.DETERMINISTIC, sampled):
            raise ValueError(f"this verifier cannot judge a {candidate.kind.name} candidate")
        queues.setdefault(int(tree.parents[candidate.node]), []).append(candidate)
    path: list[int] = []
    node = 0
    while True:
        queue = sorted(queues.get(node, ()), key=lambda c: (c.drafter, c.draw))
        child, rest = _try_candidates(tree, node, queue, p[node], coin, proposal)
        if child is None:
            return Verdict(tuple(path), coin.draw(rest))
        path.append(child)
        node = child


def _try_candidates(
    tree: TokenTree,
    node: int,
    queue: Sequence[Candidate],
    p: NDArray[np.float64],
    coin: Coin,
    proposal: Proposal,
) -> tuple[int | None, NDArray[np.float64]]:
    """The accepted child of `node`, or None and the law that remains."""
    drawn: dict[int, list[int]] = {}
    for candidate in queue:
        token = int(tree.token_ids[candidate.node])
        if candidate.kind == CandidateKind.DETERMINISTIC:
            # q is one-hot: the ratio is p itself, and the residual is p without this token.
            if coin.accept(float(p[token])):
                return candidate.node, p
            residual = p.copy()
            residual[token] = 0.0
        else:
            mine = drawn.setdefault(candidate.drafter, [])
            q = proposal(node, candidate.drafter, mine)
            if coin.accept(_ratio(float(p[token]), float(q[token]))):
                return candidate.node, p
            residual = np.maximum(p - q, 0.0)
            mine.append(token)
        total = float(residual.sum())
        if not total > 0.0:
            # Only rounding gets here: where p and q agree, a rejection has probability 0.
            return None, p
        p = residual / total
    return None, p


def _ratio(p: float, q: float) -> float:
    """p / q for the test u * q < p: a token with p = 0 never passes, and q = 0 hinders none."""
    if p <= 0.0:
        return 0.0
    return p / q if q > 0.0 else np.inf
