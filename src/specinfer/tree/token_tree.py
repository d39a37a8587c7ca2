"""TokenTree: what passes from drafter to attention to verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_NODES = 1024
"""Largest tree, root included."""


class CandidateKind(IntEnum):
    """How a child was made, which decides the verifiers that may judge it (design.md 2)."""

    DETERMINISTIC = 0
    """Chosen by rule (top-k, n-gram): q is one-hot."""
    IID = 1
    """Drawn independently from q, duplicates kept as candidates."""
    WITHOUT_REPLACEMENT = 2
    """Drawn from q with the earlier draws removed and q renormalised."""


class Candidate(NamedTuple):
    """One draw of one drafter; several may share a node."""

    node: int
    drafter: int
    draw: int
    kind: CandidateKind


@dataclass(frozen=True, eq=False)
class TokenTree:
    """An immutable token tree in depth-first order, likelier child first.

    token_ids: [num_nodes]; [0] is the root, the last committed token.
    parents:   [num_nodes]; parents[0] == -1, a parent comes before its children.
    depths:    [num_nodes]; depths[0] == 0.
    scores:    [num_nodes]; the drafter's estimate that the node is accepted once its parent is, in [0, 1].
    candidates: every (node, drafter, draw, kind), by node's parent, drafter and draw.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    scores: NDArray[np.float64]
    candidates: tuple[Candidate, ...]

    @staticmethod
    def root_only(token_id: int) -> TokenTree:
        """The tree of plain decoding."""
        return TokenTree(_frozen(np.array([token_id], np.int64)), *_ROOT, ())

    @staticmethod
    def build(
        token_ids: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float],
        candidates: Sequence[Candidate],
    ) -> TokenTree:
        """Order nodes depth first, likelier child first; parents must precede children on input.

        A non-root node without a candidate becomes its parent's next deterministic one of drafter 0.
        Raises ValueError on a malformed tree or one above MAX_NODES.
        """
        n = len(token_ids)
        if not 1 <= n <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, got {n}")
        if parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents) if i):
            raise ValueError("parents[0] must be -1 and every parent must precede its children")
        children: list[list[int]] = [[] for _ in range(n)]
        for node in range(1, n):
            children[parents[node]].append(node)
        for siblings in children:
            if len({token_ids[c] for c in siblings}) != len(siblings):
                raise ValueError("siblings must hold different tokens")
            siblings.sort(key=lambda c: -scores[c])
        order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(children[node]))
        place = {node: i for i, node in enumerate(order)}
        new_parents = np.array([-1 if i == 0 else place[parents[i]] for i in order], np.int64)
        depths = np.zeros(n, np.int64)
        for i in range(1, n):
            depths[i] = depths[new_parents[i]] + 1
        covered = {c.node for c in candidates}
        rank = {c: r for siblings in children for r, c in enumerate(siblings)}
        made = [
            Candidate(node, 0, rank[node], CandidateKind.DETERMINISTIC)
            for node in range(1, n)
            if node not in covered
        ]
        placed = [Candidate(place[c.node], *c[1:]) for c in (*candidates, *made)]
        placed.sort(key=lambda c: (new_parents[c.node], c.drafter, c.draw))
        return TokenTree(
            _frozen(np.array([token_ids[i] for i in order], np.int64)),
            _frozen(new_parents),
            _frozen(depths),
            _frozen(np.array([scores[i] for i in order], np.float64)),
            tuple(placed),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return len(self.token_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes, root excluded."""
        return len(self.token_ids) - 1

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for a root alone."""
        deepest: int = max(self.depths.tolist())
        return deepest

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[node] -> its children, likelier first."""
        lists: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node in range(1, self.num_nodes):
            lists[self.parents[node]].append(node)
        return tuple(tuple(c) for c in lists)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """[node] -> nodes from the root's child down to it; () for the root."""
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, self.num_nodes):
            paths.append((*paths[self.parents[node]], node))
        return tuple(paths)

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`."""
        return tuple(int(self.token_ids[i]) for i in self.paths[node])

    @cached_property
    def places(self) -> dict[tuple[int, ...], int]:
        """`path_tokens` of a node -> the node."""
        return {self.path_tokens(node): node for node in range(self.num_nodes)}

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`."""
        for child in self.children[node]:
            if self.token_ids[child] == token_id:
                return child
        return None

    def mask(self) -> NDArray[np.bool_]:
        """[num_nodes, num_nodes]: node i sees node j (itself and its ancestors). SpecInfer, section 4.2."""
        mask = np.eye(self.num_nodes, dtype=np.bool_)
        for node in range(1, self.num_nodes):
            mask[node] |= mask[self.parents[node]]
        return mask


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


_ROOT = (_frozen(np.array([-1])), _frozen(np.array([0])), _frozen(np.array([1.0])))
"""Parents, depths and scores of a root alone."""
