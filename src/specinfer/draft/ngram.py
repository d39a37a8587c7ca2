"""NgramDrafter: what followed the last few tokens before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.growth import GrowingTree, expand
from specinfer.draft.vocabulary import Ints
from specinfer.tree import CandidateKind, TokenTree, Topology
from specinfer.verify.verdict import Verdict

NONE: Ints = np.zeros(0, np.int64)
MAX_MATCHES = 16
"""Of each length, the latest."""
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
                        found[i] = self._continuations(self._text(contexts[i]), length)
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

    def _text(self, context: DraftContext) -> Ints:
        """The tokens as an array; committed ones are converted once."""
        known: Ints = context.notes.get(self, NONE)
        text = np.concatenate([known, np.array(context.tokens[len(known) :], np.int64)])
        context.notes[self] = text[: len(context.slots)]
        return text

    def _continuations(self, text: Ints, length: int) -> list[Continuation]:
        """Longest and latest match first."""
        if length < 1:
            return []
        last = len(text) - 1
        ends = np.flatnonzero(text[:last] == text[last])
        matches = [ends]  # [n - 1]: where n tokens that equal the last n end
        for k in range(1, self._max_ngram):
            ends = ends[ends >= k]
            ends = ends[text[ends - k] == text[last - k]]
            if not len(ends):
                break
            matches.append(ends)
        found: dict[tuple[int, ...], float] = {}
        for n in range(len(matches), self._min_ngram - 1, -1):
            for end in matches[n - 1][::-1][:MAX_MATCHES].tolist():
                follow = text[end + 1 : end + 1 + length]
                found.setdefault(tuple(follow.tolist()), n / (n + 1))
        return list(found.items())
