"""GrowingTree: a tree while a drafter makes it, one depth at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from specinfer.tree import Candidate, CandidateKind, Level, TokenTree, Topology

CERTAIN = 1.0
"""The score of a node that a grammar forced, and of none that was drafted."""
ALMOST = math.nextafter(CERTAIN, 0.0)


class GrowingTree:
    """Nodes in the order they were made; `frontier` holds those of the last depth that may grow."""

    def __init__(self, root: int, *, max_depth: int, max_nodes: int, end_token_ids: Sequence[int]) -> None:
        self.token_ids = [root]
        self.parents = [-1]
        self.scores = [1.0]
        self.path_scores = [1.0]
        self.path_tokens: list[tuple[int, ...]] = [()]
        self.frontier = [0]
        self._next_frontier: list[int] = []
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        self._end_token_ids = frozenset(end_token_ids)
        self._candidates: list[Candidate] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, score: float, draw: int, kind: CandidateKind) -> int:
        """Add a candidate; one that repeats a sibling's token shares its node."""
        node = self._children.get((parent, token))
        if node is None:
            node = len(self.token_ids)
            score = min(score, ALMOST)
            self._children[parent, token] = node
            self.token_ids.append(token)
            self.parents.append(parent)
            self.scores.append(score)
            self.path_scores.append(self.path_scores[parent] * score)
            self.path_tokens.append((*self.path_tokens[parent], token))
            if token not in self._end_token_ids:  # a tree never grows below an end token
                self._next_frontier.append(node)
        self._candidates.append(Candidate(node, 0, draw, kind))
        return node

    def advance(self) -> None:
        """Go one depth down."""
        self.frontier, self._next_frontier = self._next_frontier, []

    def has_room(self, depth: int) -> bool:
        """Whether nodes of this depth may have children."""
        return depth < self._max_depth and len(self.token_ids) < self._max_nodes

    def limit(self, depth: int, counts: Sequence[int]) -> list[int]:
        """The counts this tree still has room for, decided without a look at what will be drawn."""
        room = self._max_nodes - len(self.token_ids) if self.has_room(depth) else 0
        limited = []
        for count in counts:
            limited.append(min(count, room))
            room -= limited[-1]
        return limited

    def build(self) -> TokenTree:
        """The finished tree."""
        if len(self.token_ids) == 1:
            return TokenTree.root_only(self.token_ids[0])
        return TokenTree.build(self.token_ids, self.parents, self.scores, self._candidates)


def expand(
    topology: Topology,
    depth: int,
    trees: Sequence[GrowingTree | None],
    drafter: int,
    is_behind: NDArray[np.bool_] | None = None,
) -> list[list[int]]:
    """Ask the topology once for a drafter's whole batch: [request] -> children per frontier node. Frontier
    nodes without children are dropped. It is not asked about trees that have no room, which it would take to
    be drafted. is_behind: [request], see Level."""
    for tree in trees:
        if tree is not None and not tree.has_room(depth):
            tree.frontier = []
    requests = [(r, node) for r, tree in enumerate(trees) if tree is not None for node in tree.frontier]
    if not requests:
        return [[] for _ in trees]
    scores = [tree.path_scores[node] for tree in trees if tree is not None for node in tree.frontier]
    request = np.array([r for r, _ in requests], np.int64)
    level = Level(
        depth,
        request,
        np.full(len(requests), drafter),
        np.array(scores),
        None if is_behind is None else is_behind[request],
    )
    expanded = np.asarray(topology.expand(level), np.int64).tolist()
    assert len(expanded) == len(requests), "a topology answers for every node"
    counts = iter(expanded)
    result: list[list[int]] = []
    for tree in trees:
        if tree is None:
            result.append([])
            continue
        limited = tree.limit(depth, list(islice(counts, len(tree.frontier))))
        tree.frontier = [node for node, count in zip(tree.frontier, limited, strict=True) if count]
        result.append([count for count in limited if count])
    return result
