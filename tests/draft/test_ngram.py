"""NgramDrafter against prompt lookup written the naive way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specinfer import Chain, Expansion, SamplingParams, TokenTree
from specinfer.draft.drafter import DraftContext
from specinfer.draft.ngram import NgramDrafter
from specinfer.sampling.row import Row
from specinfer.tree import CandidateKind, Topology

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=16)


def context(
    tokens: list[int], max_depth: int = 8, max_nodes: int = 64, ends: tuple[int, ...] = ()
) -> DraftContext:
    row = Row(SamplingParams(), 0, 0, len(tokens), len(tokens), ends, tokens)
    return DraftContext(tokens, np.arange(len(tokens) - 1), row, max_depth, max_nodes)


def propose(topology: Topology, *contexts: DraftContext) -> list[TokenTree]:
    drafter = NgramDrafter()
    proposals = drafter.collect(drafter.launch(contexts, topology))
    assert all(p.law == {} for p in proposals)
    return [p.tree for p in proposals]


def continuations(tokens: list[int], length: int) -> list[list[int]]:
    """What followed the last 4, 3 or 2 tokens before: longest suffix first, latest place first."""
    found = []
    for n in (4, 3, 2):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                found.append(tokens[start + n : start + n + length])
    return found


@given(TOKENS, st.integers(1, 5))
def test_a_chain_is_what_followed(tokens: list[int], depth: int) -> None:
    expected: list[int] = []
    while len(expected) < depth:
        found = [
            c
            for c in continuations(tokens, depth)
            if c[: len(expected)] == expected and len(c) > len(expected)
        ]
        if not found:
            break
        expected.append(found[0][len(expected)])
    (tree,) = propose(Chain(depth), context(tokens))
    assert tree.token_ids.tolist() == [tokens[-1], *expected]
    assert tree.parents.tolist() == list(range(-1, len(expected)))


@given(TOKENS, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 9))
def test_every_path_followed_somewhere(
    tokens: list[int], widths: list[int], max_depth: int, max_nodes: int
) -> None:
    (tree,) = propose(Expansion(*widths), context(tokens, max_depth, max_nodes))
    depth = min(len(widths), max_depth)
    known = continuations(tokens, depth)
    assert tree.max_depth <= depth
    assert tree.num_nodes <= max_nodes
    for node in range(tree.num_nodes):
        path = list(tree.path_tokens(node))
        assert not path or any(c[: len(path)] == path for c in known)
        if tree.children[node]:
            assert len(tree.children[node]) <= widths[tree.depths[node]]
            firsts = [c[len(path)] for c in known if c[: len(path)] == path and len(c) > len(path)]
            in_order = list(dict.fromkeys(firsts))[: len(tree.children[node])]
            assert [int(tree.token_ids[c]) for c in tree.children[node]] == in_order
    if known and max_nodes > 1:
        assert tree.num_nodes > 1
    assert all(c.kind == CandidateKind.DETERMINISTIC for c in tree.candidates)
    assert ((tree.scores >= 0) & (tree.scores <= 1)).all()


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(0, 16)), min_size=1, max_size=4))
def test_what_is_remembered_of_a_request_changes_nothing(
    text: list[int], steps: list[tuple[list[int], int]]
) -> None:
    """It grows; some of its last tokens are a path that may still be dropped, and slots are taken from it."""
    drafter = NgramDrafter()
    notes: dict[Any, Any] = {}
    for more, num_slots in steps:
        seen = context([*text, *more])
        with_notes = replace(seen, slots=np.arange(min(num_slots, len(text))), notes=notes)
        [remembered] = drafter.launch([with_notes], Chain(4))
        [fresh] = propose(Chain(4), seen)
        assert remembered.tree.token_ids.tolist() == fresh.token_ids.tolist()
        text = [*text, more[0]]


def test_a_batch_is_its_requests_one_by_one() -> None:
    texts = [[1, 2, 3, 1, 2], [5], [7, 7, 7, 7], [1, 2, 9, 1, 2, 8, 1, 2]]
    together = propose(Expansion(2, 1), *[context(t) for t in texts])
    alone = [propose(Expansion(2, 1), context(t))[0] for t in texts]
    assert [t.token_ids.tolist() for t in together] == [t.token_ids.tolist() for t in alone]
    assert [t.token_ids.tolist() for t in together] == [[2, 3, 1], [5], [7, 7, 7], [2, 8, 1, 9, 1]]


def test_nothing_below_an_end_token() -> None:
    tokens = [1, 2, 0, 5, 1, 2]
    (tree,) = propose(Chain(3), context(tokens, ends=(0,)))
    assert tree.token_ids.tolist() == [2, 0]


def test_only_the_latest_of_many_places_are_looked_at() -> None:
    """A long text of one token repeated stays cheap, and still proposes."""
    (tree,) = propose(Chain(4), context([7] * 5000))
    assert tree.token_ids.tolist() == [7] * 5
