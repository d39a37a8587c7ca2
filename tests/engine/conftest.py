"""Drafters and choosers that do as they are told, put into a real engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specinfer import LLM, Chain, TokenTree
from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.sampling.row import Row
from specinfer.tree import CandidateKind, Topology
from specinfer.verify.verdict import Verdict

WRONG = 299
VOCAB = 300


class Oracle:
    """Proposes the true continuation as a chain, with a wrong token at the output indices `wrong_at`.

    answer: the output tokens of each sample index. Raises `fail` once, when it is set.
    """

    kinds = frozenset({CandidateKind.DETERMINISTIC})

    def __init__(self, answers: Sequence[Sequence[int]], depth: int, wrong_at: Collection[int] = ()) -> None:
        self.answers = answers
        self.depth = depth
        self.wrong_at = wrong_at
        self.fail: BaseException | None = None
        self.contexts: list[DraftContext] = []

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[Proposal]:
        self.contexts.extend(contexts)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        return [Proposal(self._tree(c), {}) for c in contexts]

    def _tree(self, c: DraftContext) -> TokenTree:
        done = len(c.tokens) - c.row.num_prompt_tokens
        depth = min(self.depth, c.max_depth, c.max_nodes - 1)
        right = self.answers[c.row.sample_index][done : done + depth]
        tokens = [WRONG if done + i in self.wrong_at else int(t) for i, t in enumerate(right)]
        return TokenTree.build(
            [c.tokens[-1], *tokens], list(range(-1, len(tokens))), [1.0] * (len(tokens) + 1), []
        )

    def collect(self, handle: list[Proposal]) -> list[Proposal]:
        return handle

    def observe(self, trees: Any, verdicts: Any) -> None:
        pass


class ArbitraryDrafter:
    """Random trees that hold the right continuation with some probability, beside wrong ones."""

    kinds = frozenset({CandidateKind.DETERMINISTIC})

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], seed: int) -> None:
        self._answers = answers
        self._rng = np.random.default_rng(seed)

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[Proposal]:
        return [Proposal(self._tree(c), {}) for c in contexts]

    def collect(self, handle: list[Proposal]) -> list[Proposal]:
        return handle

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        for tree, verdict in zip(trees, verdicts, strict=True):
            assert all(0 < node < tree.num_nodes for node in verdict.path)

    def _tree(self, context: DraftContext) -> TokenTree:
        prompt = tuple(context.tokens[: context.row.num_prompt_tokens])
        done = len(context.tokens) - len(prompt)
        right = self._answers[(*prompt, context.row.sample_index)][done:]
        tokens, parents, depths = [context.tokens[-1]], [-1], [0]
        on_path = [True]
        taken: set[tuple[int, int]] = set()
        for _ in range(int(self._rng.integers(0, context.max_nodes))):
            parent = int(self._rng.integers(len(tokens)))
            if self._rng.random() < 0.5 and True in on_path:
                parent = max(i for i, ok in enumerate(on_path) if ok)
            depth = depths[parent] + 1
            if depth > context.max_depth:
                continue
            is_right = on_path[parent] and depth <= len(right) and self._rng.random() < 0.7
            token = right[depth - 1] if is_right else int(self._rng.integers(VOCAB))
            if (parent, token) in taken:
                continue
            taken.add((parent, token))
            tokens.append(int(token))
            parents.append(parent)
            depths.append(depth)
            on_path.append(on_path[parent] and depth <= len(right) and token == right[depth - 1])
        return TokenTree.build(tokens, parents, list(self._rng.random(len(tokens))), [])


class Script:
    """A chooser whose choices are written down: answers[sample index][output index]."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers = answers

    def choose_one(self, logits: Any, row: Row) -> int:
        answer = self.answers[row.sample_index]
        i = row.position - row.num_prompt_tokens
        return answer[i] if i < len(answer) else 0


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def arbitrary() -> type[ArbitraryDrafter]:
    return ArbitraryDrafter


@pytest.fixture(scope="session")
def script() -> type[Script]:
    return Script


Putting = Callable[..., Any]


@pytest.fixture(scope="session")
def put() -> Putting:
    """with put(llm, drafter=..., chooser=...): the engine works with these parts meanwhile."""

    @contextmanager
    def putting(llm: LLM, **parts: Any) -> Iterator[None]:
        before = llm.engine.parts
        if "drafter" in parts:
            parts = {"topology": Chain(8), "max_tree_nodes": 9, **parts}
        llm.engine.parts = replace(before, **parts)
        try:
            yield
        finally:
            llm.engine.parts = before

    return putting


@pytest.fixture(scope="package")
def tiny_llm(tiny_model: Path) -> LLM:
    """One tiny target without drafts for a whole package of tests; they leave it idle."""
    return LLM(str(tiny_model), dtype="float32", max_num_seqs=8, prefix_cache=False)
