"""Gains: how often drafted children are accepted, from those that were judged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from specinfer.draft.growth import CERTAIN
from specinfer.tree import TokenTree

MEMORY, LONG_MEMORY = 0.98, 0.998
"""What is left of an observation's weight after another step: in what holds now, and in what is usual."""
USUAL_WEIGHT = 6.0
"""Of what is usual, in observations."""
PRIOR_WEIGHT = 6.0
"""Of the assumption, in observations of what is usual."""
FIRST, NEXT = 0.5, 0.3
"""A first child's assumed acceptance, and each further one's as a part of the one before it."""
LEVELS = (0.1, 0.2, 0.4, 0.7)
"""Limits between the likelihoods of parents that are told apart."""
MAX_DEPTH = 3
"""Deeper parents are not told apart."""


class _Seen(NamedTuple):
    """Children that were judged up to a step, as much of them as is remembered."""

    step: int
    num_accepted: float = 0.0
    num_made: float = 0.0
    usually_accepted: float = 0.0
    usually_made: float = 0.0

    def at(self, step: int) -> _Seen:
        """What is left of it."""
        left, usually_left = MEMORY ** (step - self.step), LONG_MEMORY ** (step - self.step)
        return _Seen(
            step,
            left * self.num_accepted,
            left * self.num_made,
            usually_left * self.usually_accepted,
            usually_left * self.usually_made,
        )


class Gains:
    """The chance that a parent's next child is accepted, the parent with it, by who drafts it, the parent's
    depth and likelihood, and the number of the child.

    Texts differ, so what was seen fades soon, towards what is usual with this drafter; and that slowly,
    towards an assumption that gives what was given up another chance.
    """

    def __init__(self) -> None:
        self._step = 0
        self._seen: dict[tuple[int, int, int, int], _Seen] = {}

    def estimate(self, drafter: int, depth: int, likelihood: float, child: int) -> float:
        """child: 0 is the first. likelihood: that the parent is accepted, by the drafter's own scores."""
        seen = self._at(key(drafter, depth, likelihood, child))
        assumed = likelihood * FIRST * NEXT**child
        usual = (PRIOR_WEIGHT * assumed + seen.usually_accepted) / (PRIOR_WEIGHT + seen.usually_made)
        return (USUAL_WEIGHT * usual + seen.num_accepted) / (USUAL_WEIGHT + seen.num_made)

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

    def _at(self, place: tuple[int, int, int, int]) -> _Seen:
        return self._seen.get(place, _Seen(self._step)).at(self._step)

    def _count(self, place: tuple[int, int, int, int], is_accepted: bool) -> None:
        _, accepted, made, usually_accepted, usually_made = self._at(place)
        self._seen[place] = _Seen(
            self._step, accepted + is_accepted, made + 1, usually_accepted + is_accepted, usually_made + 1
        )


def key(drafter: int, depth: int, likelihood: float, child: int) -> tuple[int, int, int, int]:
    return drafter, min(depth, MAX_DEPTH), bisect_right(LEVELS, likelihood), child
