"""ModelDrafter: a small model that grows token trees, one forward per depth for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.attention import Span
from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.growth import GrowingTree, expand
from specinfer.runtime import Batch, Runner, WorkItem
from specinfer.sampling.chooser import Chooser
from specinfer.sampling.pick import draw_iid, draw_without_replacement, pick_top
from specinfer.sampling.row import Row
from specinfer.sampling.streams import Purpose, stream
from specinfer.tree import CandidateKind, TokenTree, Topology
from specinfer.verify.verdict import Verdict

CATCH_UP_TOKENS = 512
"""Trunk tokens per forward while a draft catches up."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DraftVocab:
    """A draft that works on a subset of the target's vocabulary.

    to_target: [draft vocabulary] target ids of the head's rows. to_draft: [target vocabulary] ids fed to the
    embedding (0 for tokens outside the subset), or None where the embedding takes the target's ids.
    """

    to_target: torch.Tensor
    to_draft: Ints | None


class ModelDrafter:
    """Proposes with one draft model that shares the target's token ids. Without a DraftVocab its vocabulary
    is the target's, or longer by padding.

    Committed tokens keep their K/V under the request's own slots in the draft's pool; the tree's K/V lives in
    the pool's scratch slots and is forgotten when `launch` returns. At temperature 0 children are the top-k;
    above it they are made as `kind` says: coupled top-k (DETERMINISTIC), or drawn.
    """

    def __init__(
        self,
        runner: Runner,
        chooser: Chooser,
        *,
        kind: CandidateKind,
        vocab: DraftVocab | None,
        target_vocab_size: int,
        max_position: int,
        lane: int = 0,
    ) -> None:
        """max_position: requests longer than this go on without this draft. lane: its number in an ensemble,
        which keeps the members' draws apart."""
        self._runner = runner
        self._chooser = chooser
        self._kind = kind
        self._vocab = vocab
        self._target_vocab_size = target_vocab_size
        self._max_position = max_position
        self._lane = lane

    @property
    def kinds(self) -> frozenset[CandidateKind]:
        return frozenset({self._kind, CandidateKind.DETERMINISTIC})

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[Proposal]:
        trees = [self._plant(context) for context in contexts]
        laws: list[dict[tuple[int, int], NDArray[np.float64]]] = [{} for _ in contexts]
        scratch = _Scratch(self._runner.pool.scratch_start, contexts)
        for depth in range(topology.max_depth):
            counts = expand(topology, depth, trees, self._lane)
            if not any(counts):
                break
            rows = [
                row_at(context.row, tree.path_tokens[node])
                for context, tree in zip(contexts, trees, strict=True)
                if tree is not None
                for node in tree.frontier
            ]
            logits = (
                self._root_logits(contexts, trees, scratch)
                if depth == 0
                else self._node_logits(trees, scratch)
            )
            self._grow(trees, counts, logits, rows, laws)
            for tree in trees:
                if tree is not None:
                    tree.advance()
        return [
            self._finish(tree, context, law) for tree, context, law in zip(trees, contexts, laws, strict=True)
        ]

    def collect(self, handle: list[Proposal]) -> list[Proposal]:
        return handle

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        pass

    def _plant(self, context: DraftContext) -> GrowingTree | None:
        if len(context.tokens) >= self._max_position:
            return None
        return GrowingTree(
            context.tokens[-1],
            max_depth=min(context.max_depth, self._max_position - len(context.tokens)),
            max_nodes=context.max_nodes,
            end_token_ids=context.row.end_token_ids,
        )

    def _finish(
        self, tree: GrowingTree | None, context: DraftContext, law: dict[tuple[int, int], NDArray[np.float64]]
    ) -> Proposal:
        if tree is None:
            return Proposal(TokenTree.root_only(context.tokens[-1]), {})
        built = tree.build()
        if not law:
            return Proposal(built, {})
        places = tree.places(built)
        return Proposal(built, {(drafter, places[node]): q for (drafter, node), q in law.items()})

    def _root_logits(
        self, contexts: Sequence[DraftContext], trees: Sequence[GrowingTree | None], scratch: _Scratch
    ) -> torch.Tensor:
        """Feed each context's tokens whose K/V is missing, the root last: [growing requests, draft vocab]."""
        filled = self._runner.pool.filled
        todo: list[tuple[Ints, Ints, int]] = []  # (tokens, slots, how many are written)
        for r, (context, tree) in enumerate(zip(contexts, trees, strict=True)):
            if tree is None or not tree.frontier:
                continue
            slots = np.concatenate([context.slots, scratch.trunk(r)])
            known = filled[context.slots]
            written = len(known) if known.all() else int(known.argmin())
            todo.append((np.asarray(context.tokens, np.int64), slots, written))
        while any(len(tokens) - written > CATCH_UP_TOKENS for tokens, _, written in todo):
            items = []
            for i, (tokens, slots, written) in enumerate(todo):
                if len(tokens) - written > CATCH_UP_TOKENS:
                    items.append(self._trunk(tokens, slots, written, written + CATCH_UP_TOKENS))
                    todo[i] = (tokens, slots, written + CATCH_UP_TOKENS)
            self._runner.run(Batch.of(items))
        items = [self._trunk(tokens, slots, written, len(tokens)) for tokens, slots, written in todo]
        logits, _ = self._runner.run(Batch.of(items))
        for context, tree in zip(contexts, trees, strict=True):
            if tree is not None and tree.frontier:
                filled[context.slots] = True
        return logits

    def _trunk(self, tokens: Ints, slots: Ints, start: int, end: int) -> WorkItem:
        span = Span(slots[:start], slots[start:end], np.arange(-1, end - start - 1))
        last = np.array([end - start - 1] if end == len(tokens) else [], np.int64)
        return WorkItem(span, self._to_draft(tokens[start:end]), last)

    def _node_logits(self, trees: Sequence[GrowingTree | None], scratch: _Scratch) -> torch.Tensor:
        """Logits after every frontier node: [frontier of the batch, draft vocab]. Each node is a span of its
        own: its ancestors' K/V is written, so they are its context."""
        items = []
        for r, tree in enumerate(trees):
            if tree is None:
                continue
            for node in tree.frontier:
                span = Span(scratch.context(r, tree, node), scratch.node(r, node), np.array([-1], np.int64))
                token = np.array([tree.token_ids[node]], np.int64)
                items.append(WorkItem(span, self._to_draft(token), np.zeros(1, np.int64)))
        logits, _ = self._runner.run(Batch.of(items))
        return logits

    def _grow(
        self,
        trees: Sequence[GrowingTree | None],
        counts: Sequence[Sequence[int]],
        logits: torch.Tensor,
        rows: Sequence[Row],
        laws: Sequence[dict[tuple[int, int], NDArray[np.float64]]],
    ) -> None:
        """Give every frontier node its children."""
        token_ids = None if self._vocab is None else self._vocab.to_target
        if token_ids is None:
            logits = logits[:, : self._target_vocab_size]  # a draft may be padded further than the target
        flat = [
            (r, node, count)
            for r, tree in enumerate(trees)
            if tree is not None
            for node, count in zip(tree.frontier, counts[r], strict=True)
        ]
        drawn = [self._kind != CandidateKind.DETERMINISTIC and row.params.temperature > 0 for row in rows]
        top = [i for i, is_drawn in enumerate(drawn) if not is_drawn]
        if top:
            kept = logits if len(top) == len(rows) else logits[top]
            perturbed = self._chooser.perturbed(kept, [rows[i] for i in top], token_ids)
            picked = pick_top(perturbed, [flat[i][2] for i in top])
            for i, (columns, scores) in zip(top, picked, strict=True):
                r, node, _ = flat[i]
                self._add(trees[r], node, columns, scores, CandidateKind.DETERMINISTIC)
        sampled = [i for i, is_drawn in enumerate(drawn) if is_drawn]
        if not sampled:
            return
        laws_of = self._chooser.probabilities(logits[sampled], [rows[i] for i in sampled], token_ids)
        draw = draw_iid if self._kind == CandidateKind.IID else draw_without_replacement
        for i, q in zip(sampled, laws_of, strict=True):
            r, node, count = flat[i]
            generator = stream(
                rows[i].seed, rows[i].sample_index, rows[i].position, Purpose.DRAFT, self._node_lane(rows[i])
            )
            columns = draw(q, count, generator)
            self._add(trees[r], node, columns, [float(q[c]) for c in columns], self._kind)
            laws[r][0, node] = self._on_target(q)

    def _add(
        self,
        tree: GrowingTree | None,
        parent: int,
        columns: Sequence[int],
        scores: Sequence[float],
        kind: CandidateKind,
    ) -> None:
        assert tree is not None
        for draw, (column, score) in enumerate(zip(columns, scores, strict=True)):
            token = column if self._vocab is None else int(self._vocab.to_target[column])
            tree.add(parent, token, score, draw, kind)

    def _node_lane(self, row: Row) -> int:
        """Draws at different nodes of one depth must not share their numbers."""
        lane = self._lane
        for token in row.path:
            lane = (lane * 1000003 + token + 1) % 2**63
        return lane

    def _on_target(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """q over the target's ids."""
        if self._vocab is None:
            return q
        full = np.zeros(self._target_vocab_size)
        full[self._vocab.to_target.cpu().numpy()] = q
        return full

    def _to_draft(self, tokens: Ints) -> Ints:
        return tokens if self._vocab is None or self._vocab.to_draft is None else self._vocab.to_draft[tokens]


class _Scratch:
    """Where the uncommitted tokens of one round live: per request its trunk's, then its nodes'."""

    def __init__(self, start: int, contexts: Sequence[DraftContext]) -> None:
        self._contexts = contexts
        self._starts = []
        for context in contexts:
            self._starts.append(start)
            start += len(context.tokens) - len(context.slots) + context.max_nodes - 1

    def trunk(self, r: int) -> Ints:
        """Slots of the tokens that have none of their own, the root last."""
        context = self._contexts[r]
        return np.arange(self._starts[r], self._starts[r] + len(context.tokens) - len(context.slots))

    def node(self, r: int, node: int) -> Ints:
        """[1], the slot of a node other than the root."""
        context = self._contexts[r]
        return np.array([self._starts[r] + len(context.tokens) - len(context.slots) + node - 1], np.int64)

    def context(self, r: int, tree: GrowingTree, node: int) -> Ints:
        """Slots of everything above `node`, by position."""
        path = []
        parent = tree.parents[node]
        while parent > 0:
            path.append(self.node(r, parent))
            parent = tree.parents[parent]
        return np.concatenate([self._contexts[r].slots, self.trunk(r), *path[::-1]])


def row_at(root: Row, path: tuple[int, ...]) -> Row:
    """The row after `path` below the root."""
    return replace(root, position=root.position + len(path), path=(*root.path, *path))
