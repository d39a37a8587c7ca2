"""ModelDrafter: a small model that grows token trees, one forward per depth for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.attention import Span
from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.growth import GrowingTree, expand
from specinfer.draft.history import Histories, History
from specinfer.draft.vocabulary import DraftVocab, Ints
from specinfer.runtime import Batch, Runner, WorkItem
from specinfer.sampling.chooser import Chooser
from specinfer.sampling.pick import draw_iid, draw_without_replacement, pick_top
from specinfer.sampling.row import Row
from specinfer.sampling.streams import Purpose, stream
from specinfer.tree import CandidateKind, TokenTree, Topology
from specinfer.verify.verdict import Verdict

STEP_TOKENS = 10
"""More than one step adds to a text."""
CATCH_UP_TOKENS = 512
"""Of a request per forward while a draft catches up."""
MAX_FORWARD_TOKENS = 1024
"""Of all requests, unless one alone has more."""


class ModelDrafter:
    """Proposes with one draft model. Without a DraftVocab its vocabulary is the target's, or longer by
    padding; with one it proposes among the tokens that both have.

    Trees are in the target's token ids. Committed tokens keep their K/V in the draft's pool, under the slots
    that `histories` says; the tree's K/V lives in the pool's scratch slots and is forgotten when `launch`
    returns. At temperature 0 children are the top-k; above it they are made as `kind` says: coupled top-k
    (DETERMINISTIC), or drawn from the draft's law over the tokens it may propose.
    """

    def __init__(
        self,
        runner: Runner,
        chooser: Chooser,
        *,
        kind: CandidateKind,
        vocab: DraftVocab | None,
        histories: Histories,
        target_vocab_size: int,
        max_position: int,
        lane: int = 0,
    ) -> None:
        """max_position: histories longer than this go on without this draft. lane: its number in an ensemble,
        which keeps the members' draws apart."""
        self._runner = runner
        self._chooser = chooser
        self._kind = kind
        self._vocab = vocab
        self._histories = histories
        self._columns = self._to_target = None
        if vocab is not None:
            device = runner.pool.k[0].device
            self._to_target = torch.from_numpy(vocab.to_target).to(device)
            self._columns = None if vocab.columns is None else torch.from_numpy(vocab.columns).to(device)
        self._target_vocab_size = target_vocab_size
        self._max_position = max_position
        self._lane = lane

    @property
    def kinds(self) -> frozenset[CandidateKind]:
        return frozenset({self._kind, CandidateKind.DETERMINISTIC})

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[Proposal]:
        with self._histories.open(contexts) as histories:
            return self._draft(contexts, histories, topology)

    def _draft(
        self, contexts: Sequence[DraftContext], histories: Sequence[History | None], topology: Topology
    ) -> list[Proposal]:
        trees = [self._plant(c, history) for c, history in zip(contexts, histories, strict=True)]
        laws: list[dict[tuple[int, int], NDArray[np.float64]]] = [{} for _ in contexts]
        scratch = _Scratch(self._runner.pool.scratch_start, contexts, histories)
        is_behind = np.array([h is not None and self._is_behind(h) for h in histories], np.bool_)
        for depth in range(topology.max_depth):
            counts = expand(topology, depth, trees, self._lane, is_behind if depth == 0 else None)
            if not any(counts):
                break
            rows = [
                context.row.after(tree.path_tokens[node])
                for context, tree in zip(contexts, trees, strict=True)
                if tree is not None
                for node in tree.frontier
            ]
            logits = (
                self._root_logits(histories, trees, scratch)
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

    def _plant(self, context: DraftContext, history: History | None) -> GrowingTree | None:
        if history is None or history.num_tokens >= self._max_position:
            return None
        return GrowingTree(
            context.tokens[-1],
            max_depth=min(context.max_depth, self._max_position - history.num_tokens),
            max_nodes=context.max_nodes,
            end_token_ids=context.row.end_token_ids,
        )

    def _finish(
        self, tree: GrowingTree | None, context: DraftContext, law: dict[tuple[int, int], NDArray[np.float64]]
    ) -> Proposal:
        if tree is None:
            return Proposal(TokenTree.root_only(context.tokens[-1]), {})
        built = tree.build()
        return Proposal(
            built, {(drafter, built.places[tree.path_tokens[node]]): q for (drafter, node), q in law.items()}
        )

    def _is_behind(self, history: History) -> bool:
        """Whether more is to be read than what a step may have added."""
        known = history.num_tokens - STEP_TOKENS
        filled, slots = self._runner.pool.filled, history.slots
        return known > 0 and (known > len(slots) or not filled[slots[known - 1]])

    def _root_logits(
        self, histories: Sequence[History | None], trees: Sequence[GrowingTree | None], scratch: _Scratch
    ) -> torch.Tensor:
        """Feed each history's tokens whose K/V is missing: [growing requests, draft vocab]."""
        filled = self._runner.pool.filled
        waiting = {
            r: (history, np.concatenate([history.slots, scratch.trunk(r)]))
            for r, (history, tree) in enumerate(zip(histories, trees, strict=True))
            if history is not None and tree is not None and tree.frontier
        }
        order: list[int] = []
        found: list[torch.Tensor] = []
        while waiting:
            items: list[WorkItem] = []
            ends: dict[int, int] = {}
            num_rows, reading = 0, set()
            for r, (history, slots) in waiting.items():
                start = int(filled[slots].argmin())
                end = min(len(slots), start + CATCH_UP_TOKENS)
                # What several have in common is read once: the others wait for it.
                if slots[start] in reading or (items and num_rows + end - start > MAX_FORWARD_TOKENS):
                    continue
                reading.add(slots[start])
                num_rows += end - start
                items.append(self._trunk(history, slots, start, end))
                ends[r] = end
            logits, _ = self._runner.run(Batch.of(items))
            if len(logits):
                found.append(logits)
            for r, end in ends.items():
                history, slots = waiting[r]
                filled[history.slots[:end]] = True
                if end == len(slots):
                    order.append(r)
                    del waiting[r]
        return found[0] if len(found) == 1 else torch.cat(found)[np.argsort(order)]

    def _trunk(self, history: History, slots: Ints, start: int, end: int) -> WorkItem:
        span = Span(slots[:start], slots[start:end], np.arange(-1, end - start - 1))
        last = np.array([end - start - 1] if end == len(slots) else [], np.int64)
        return WorkItem(span, history.tokens(start, end), last)

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
        token_ids = self._to_target
        if self._columns is not None:
            logits = logits.index_select(1, self._columns)
        elif token_ids is None:
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
        full[self._vocab.to_target] = q
        return full

    def _to_draft(self, tokens: Ints) -> Ints:
        return tokens if self._vocab is None or self._vocab.to_draft is None else self._vocab.to_draft[tokens]


class _Scratch:
    """Where the uncommitted tokens of one round live: per request its trunk's, then its nodes'."""

    def __init__(
        self, start: int, contexts: Sequence[DraftContext], histories: Sequence[History | None]
    ) -> None:
        self._slots = [np.zeros(0, np.int64) if h is None else h.slots for h in histories]
        self._starts = []
        self._trunk_lens = []
        for context, history in zip(contexts, histories, strict=True):
            self._starts.append(start)
            self._trunk_lens.append(0 if history is None else history.num_tokens - len(history.slots))
            start += self._trunk_lens[-1] + context.max_nodes - 1

    def trunk(self, r: int) -> Ints:
        """Slots of the tokens that have none of their own, the root last."""
        return np.arange(self._starts[r], self._starts[r] + self._trunk_lens[r])

    def node(self, r: int, node: int) -> Ints:
        """[1], the slot of a node other than the root."""
        return np.array([self._starts[r] + self._trunk_lens[r] + node - 1], np.int64)

    def context(self, r: int, tree: GrowingTree, node: int) -> Ints:
        """Slots of everything above `node`, by position."""
        path = []
        parent = tree.parents[node]
        while parent > 0:
            path.append(self.node(r, parent))
            parent = tree.parents[parent]
        return np.concatenate([self._slots[r], self.trunk(r), *path[::-1]])
