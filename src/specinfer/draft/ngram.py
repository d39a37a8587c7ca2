"""NgramDrafter: what followed the last few tokens before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.growth import GrowingTree, expand
from specinfer.tree import CandidateKind, TokenTree, Topology
from specinfer.verify.verdict import Verdict

Continuation = tuple[tuple[int, ...], float]
"""What followed an earlier occurrence of the suffix, and its score."""


class NgramDrafter:
    """Looks the last tokens up in the request's own prompt and output, longest match first.

    max_ngram, min_ngram: lengths of the suffix that is looked up. lane: its number in an ensemble.
    """

    kinds = frozenset({CandidateKind.DETERMINISTIC})

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, lane: int = 0) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._lane = lane

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[Proposal]:
        trees: list[GrowingTree | None] = []
        found: dict[int, list[Continuation]] = {}
        for c in contexts:
            trees.append(
                GrowingTree(
                    c.tokens[-1],
                    max_depth=c.max_depth,
                    max_nodes=c.max_nodes,
                    end_token_ids=c.row.end_token_ids,
                )
            )
        for depth in range(topology.max_depth):
            counts = expand(topology, depth, trees, self._lane)
            if not any(counts):
                break
            for i, (tree, tree_counts) in enumerate(zip(trees, counts, strict=True)):
                assert tree is not None
                for node, count in zip(tree.frontier, tree_counts, strict=True):
                    if i not in found:  # looked up for those alone that may have a tree
                        length = min(contexts[i].max_depth, topology.max_depth)
                        found[i] = self._continuations(contexts[i].tokens, length)
                    self._grow(tree, node, count, found[i])
                tree.advance()
        return [Proposal(tree.build(), {}) for tree in trees if tree is not None]

    def collect(self, handle: list[Proposal]) -> list[Proposal]:
        return handle

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        pass

    def _grow(self, tree: GrowingTree, node: int, count: int, continuations: Sequence[Continuation]) -> None:
        """Give `node` up to `count` children out of the continuations that go on from its path."""
        path = tree.path_tokens[node]
        tokens: dict[int, float] = {}
        for continuation, score in continuations:
            if len(continuation) > len(path) and continuation[: len(path)] == path and len(tokens) < count:
                tokens.setdefault(continuation[len(path)], score)
        for draw, (token, score) in enumerate(tokens.items()):
            # Later finds are less likely; strictly falling scores also keep the order of storage.
            tree.add(node, token, score / (1 + draw), draw, CandidateKind.DETERMINISTIC)

    def _continuations(self, tokens: Sequence[int], length: int) -> list[Continuation]:
        """Longest and latest match first."""
        if length < 1:
            return []
        array: NDArray[np.int64] = np.asarray(tokens, np.int64)
        found: dict[tuple[int, ...], float] = {}
        for n in range(min(self._max_ngram, len(array) - 1), self._min_ngram - 1, -1):
            # hits[i]: the n tokens from i equal the suffix, and at least one token follows them.
            hits = np.ones(len(array) - n, np.bool_)
            for k in range(n):
                hits &= array[k : len(array) - n + k] == array[len(array) - n + k]
            for start in np.flatnonzero(hits)[::-1][:16]:
                follow = array[start + n : start + n + length]
                found.setdefault(tuple(int(t) for t in follow), n / (n + 1))
        return list(found.items())
