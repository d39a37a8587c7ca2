"""Coupled verification: the target has already chosen; see how far the tree guessed it (design.md 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from specinfer.tree import TokenTree
from specinfer.verify.verdict import Verdict


def walk(tree: TokenTree, choices: Sequence[int] | NDArray[Any]) -> Verdict:
    """choices: [num_nodes], the target's choice after each node. Exact for any tree, at every temperature:
    the tree decides how many of the target's choices are used, never what they are."""
    path: list[int] = []
    node = 0
    while True:
        token = int(choices[node])
        child = tree.child(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
