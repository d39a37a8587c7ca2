"""Coupled verification: whatever the tree, what comes out is the target's own continuation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree import TokenTree
from specinfer.verify import Verdict, walk


@st.composite
def trees(draw, vocab=3, max_nodes=20):
    parents, tokens, scores = [-1], [0], [1.0]
    taken = set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent, token = draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, vocab - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            scores.append(draw(st.floats(0.0, 1.0)))
    return TokenTree.build(tokens, parents, scores, [])


def target(seed, path):
    """A target's choice after `path`: any function of the path and nothing else."""
    return hash((seed, *path)) % 3


@given(trees(), st.integers(0, 1000))
def test_the_tokens_are_the_targets_own(tree, seed):
    choices = [target(seed, tree.path_tokens(node)) for node in range(tree.num_nodes)]
    path, next_token = walk(tree, choices)
    emitted = [int(tree.token_ids[node]) for node in path] + [next_token]
    plain = []
    for _ in emitted:
        plain.append(target(seed, plain))
    assert emitted == plain
    # As long as possible: the path is one down from the root, and no child holds the last token.
    end = path[-1] if path else 0
    assert tree.paths[end] == path
    assert tree.child(end, next_token) is None


def test_a_root_alone_is_plain_decoding():
    assert walk(TokenTree.root_only(7), [3]) == Verdict((), 3)


def test_a_full_match_adds_a_bonus_token():
    tree = TokenTree.build([0, 1, 2], [-1, 0, 1], [1.0, 1.0, 1.0], [])
    assert walk(tree, [1, 2, 9]) == Verdict((1, 2), 9)
    assert walk(tree, [1, 5, 9]) == Verdict((1,), 5)
