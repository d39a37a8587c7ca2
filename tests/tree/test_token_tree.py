"""TokenTree: order, derived views, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree import Candidate, CandidateKind, TokenTree
from specinfer.tree.token_tree import MAX_NODES


@st.composite
def parts(draw, max_nodes=24, vocab=4):
    """Arguments for `build`: parents before children, siblings with different tokens, some candidates."""
    tokens, parents, scores, candidates = [draw(st.integers(0, vocab - 1))], [-1], [1.0], []
    taken = set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent, token = draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, vocab - 1))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        for draw_index in draw(st.lists(st.integers(0, 9), max_size=2, unique=True)):
            candidates.append(Candidate(len(tokens), draw(st.integers(0, 1)), draw_index, CandidateKind.IID))
        tokens.append(token)
        parents.append(parent)
        scores.append(draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])))
    return tokens, parents, scores, candidates


def sequences(tokens, parents):
    """Each node as the tokens from the root's child down to it."""
    paths = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


@given(parts())
def test_nodes_are_the_same_in_depth_first_order_likelier_child_first(made):
    tokens, parents, scores, _ = made
    tree = TokenTree.build(*made)
    before = dict(zip(sequences(tokens, parents), scores, strict=True))
    after = {tree.path_tokens(node): float(tree.scores[node]) for node in range(tree.num_nodes)}
    assert after == before
    assert tree.token_ids[0] == tokens[0]
    assert tree.num_draft_tokens == tree.num_nodes - 1 == len(tokens) - 1
    stack = [0]
    for node in range(tree.num_nodes):  # a depth-first visit meets the nodes as they are stored
        assert stack.pop() == node
        children = tree.children[node]
        assert [*tree.scores[list(children)]] == sorted(tree.scores[list(children)], reverse=True)
        stack.extend(reversed(children))


@given(parts())
def test_parents_precede_and_depths_and_paths_agree(made):
    tree = TokenTree.build(*made)
    assert tree.parents[0] == -1 and tree.depths[0] == 0
    for node in range(1, tree.num_nodes):
        parent = int(tree.parents[node])
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1 == len(tree.paths[node])
        assert tree.paths[node] == (*tree.paths[parent], node)
        assert node in tree.children[parent]
        assert tree.child(parent, int(tree.token_ids[node])) == node
    assert tree.max_depth == max(tree.depths)
    assert tree.child(0, 999) is None


@given(parts())
def test_the_mask_is_the_ancestors(made):
    tree = TokenTree.build(*made)
    mask = tree.mask()
    for node in range(tree.num_nodes):
        assert set(np.flatnonzero(mask[node])) == {0, node, *tree.paths[node]}


@given(parts())
def test_every_candidate_is_kept_and_every_node_has_one(made):
    tokens, parents, _, candidates = made
    tree = TokenTree.build(*made)
    paths = sequences(tokens, parents)
    given_ones = sorted((paths[c.node], *c[1:]) for c in candidates)
    kept = sorted((tree.path_tokens(c.node), *c[1:]) for c in tree.candidates)
    covered = {path for path, *_ in given_ones}
    assert [c for c in kept if c[0] in covered] == given_ones
    made_up = [c for c in kept if c[0] not in covered]
    assert sorted(path for path, *_ in made_up) == sorted(set(paths[1:]) - covered)
    assert all(kind == CandidateKind.DETERMINISTIC for *_, kind in made_up)
    order = [(tree.parents[c.node], c.drafter, c.draw) for c in tree.candidates]
    assert order == sorted(order)


@given(parts())
def test_arrays_are_read_only(made):
    tree = TokenTree.build(*made)
    for array in (tree.token_ids, tree.parents, tree.depths, tree.scores):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_root_alone():
    tree = TokenTree.root_only(5)
    assert (tree.num_nodes, tree.num_draft_tokens, tree.max_depth, tree.candidates) == (1, 0, 0, ())
    assert tree.children == ((),) and tree.paths == ((),) and tree.mask().tolist() == [[True]]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "1 to 1024 nodes"),
        ([0] * (MAX_NODES + 1), [-1, *range(MAX_NODES)], "got 1025"),
        ([0, 1], [0, 0], "must be -1"),
        ([0, 1], [-1, 1], "precede"),
        ([0, 1, 2], [-1, 2, 0], "precede"),
        ([0, 1], [-1, -1], "precede"),
        ([0, 1, 1], [-1, 0, 0], "different tokens"),
    ],
)
def test_malformed_trees_are_refused(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.build(tokens, parents, [1.0] * len(tokens), [])


def test_the_largest_tree_is_allowed():
    chain = TokenTree.build([0] * MAX_NODES, [-1, *range(MAX_NODES - 1)], [1.0] * MAX_NODES, [])
    assert chain.max_depth == MAX_NODES - 1
