"""merge: the union of the sequences, each shared prefix once, every candidate kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree import Candidate, CandidateKind, TokenTree, merge

KINDS = list(CandidateKind)


@st.composite
def trees(draw, max_nodes=12, vocab=3):
    tokens, parents, scores, candidates = [0], [-1], [1.0], []
    taken = set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent, token = draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, vocab - 1))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        for index in draw(st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True)):
            candidates.append(
                Candidate(len(tokens), draw(st.integers(0, 2)), index, draw(st.sampled_from(KINDS)))
            )
        tokens.append(token)
        parents.append(parent)
        scores.append(draw(st.floats(0.0, 1.0)))
    return TokenTree.build(tokens, parents, scores, candidates)


def scores_of(tree):
    return {tree.path_tokens(node): float(tree.scores[node]) for node in range(tree.num_nodes)}


@given(st.lists(trees(), min_size=1, max_size=3))
def test_the_result_is_the_union_with_each_prefix_once(many):
    merged = merge(many)
    paths = [merged.path_tokens(node) for node in range(merged.num_nodes)]
    assert len(set(paths)) == len(paths)
    expected = {}
    for tree in many:
        for path, score in scores_of(tree).items():
            expected[path] = max(score, expected.get(path, 0.0))
    assert scores_of(merged) == expected
    assert all(0 <= merged.parents[node] < node for node in range(1, merged.num_nodes))


@given(st.lists(trees(), min_size=1, max_size=3))
def test_every_candidate_is_kept_under_a_drafter_of_its_own(many):
    expected, first_drafter = [], 0
    for tree in many:
        expected += [
            (tree.path_tokens(c.node), c.drafter + first_drafter, c.draw, c.kind) for c in tree.candidates
        ]
        first_drafter += 1 + max((c.drafter for c in tree.candidates), default=0)
    merged = merge(many)
    assert sorted((merged.path_tokens(c.node), *c[1:]) for c in merged.candidates) == sorted(expected)


@given(trees())
def test_merging_a_tree_with_itself_or_its_root_changes_no_node(tree):
    for other in (tree, TokenTree.root_only(0)):
        assert scores_of(merge([tree, other])) == scores_of(merge([other, tree])) == scores_of(tree)
    assert merge([tree]) is tree


def test_what_cannot_be_merged():
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    with pytest.raises(ValueError, match="share their root"):
        merge([TokenTree.root_only(1), TokenTree.root_only(2)])
