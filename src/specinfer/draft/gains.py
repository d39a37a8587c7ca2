"""Gains: how often drafted children are accepted, from those that were judged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from specinfer.draft.growth import CERTAIN
from specinfer.tree import TokenTree

MEMORY = 0.995
"""What is left of an observation's weight after another step."""
PRIOR_WEIGHT = 2.0
FIRST, NEXT = 0.5, 0.3
"""A first child's assumed acceptance, and each further one's as a part of the one before it."""
LEVELS = (0.1, 0.2, 0.4, 0.7)
"""Limits between the likelihoods of parents that are told apart."""
MAX_DEPTH = 3
"""Deeper parents are not told apart."""


class Gains:
    """The chance that a parent's next child is accepted, the parent with it, by who drafts it, the parent's
    depth and likelihood, and the number of the child.

    Observations fade, towards an assumption that gives what was given up another chance.
    """

    def __init__(self) -> None:
        self._step = 0
        self._seen: dict[tuple[int, int, int, int], tuple[int, float, float]] = {}

    def estimate(self, drafter: int, depth: int, likelihood: float, child: int) -> float:
        """child: 0 is the first. likelihood: that the parent is accepted, by the drafter's own scores."""
        step, num_accepted, num_made = self._seen.get(
            key(drafter, depth, likelihood, child), (self._step, 0.0, 0.0)
        )
        left = MEMORY ** (self._step - step)
        assumed = likelihood * FIRST * NEXT**child
        return (PRIOR_WEIGHT * assumed + left * num_accepted) / (PRIOR_WEIGHT + left * num_made)

    def observe(self, tree: TokenTree, path: Sequence[int], preferred: Sequence[int]) -> None:
        """Count a judged tree. An accepted node that several drafters made is credited to the first of them
        in `preferred`: what the others added is nothing. A forced node is no depth of its own."""
        likelihoods, depths = [1.0], [0]
        for node in range(1, tree.num_nodes):
            parent, score = tree.parents[node], float(tree.scores[node])
            likelihoods.append(likelihoods[parent] * score)
            depths.append(depths[parent] + (score < CERTAIN))
        makers: dict[int, list[int]] = {}
        for c in tree.candidates:
            makers.setdefault(c.node, []).append(c.drafter)
        for c in tree.candidates:
            if tree.scores[c.node] == CERTAIN:
                continue
            is_accepted = c.node in path and c.drafter == min(makers[c.node], key=preferred.index)
            parent = int(tree.parents[c.node])
            self._count(key(c.drafter, depths[parent], likelihoods[parent], c.draw), is_accepted)

    def advance(self) -> None:
        """A step is over."""
        self._step += 1

    def _count(self, place: tuple[int, int, int, int], is_accepted: bool) -> None:
        step, num_accepted, num_made = self._seen.get(place, (self._step, 0.0, 0.0))
        left = MEMORY ** (self._step - step)
        self._seen[place] = (self._step, left * num_accepted + is_accepted, left * num_made + 1)


def key(drafter: int, depth: int, likelihood: float, child: int) -> tuple[int, int, int, int]:
    return drafter, min(depth, MAX_DEPTH), bisect_right(LEVELS, likelihood), child
