"""Merge: several trees on one root become their union (SpecInfer, definition 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.tree.token_tree import Candidate, TokenTree


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Every sequence of every tree is in the result, each shared prefix once.

    A shared node takes the larger score and keeps every candidate; the drafters of a tree are numbered
    after those of the trees before it. Raises ValueError when the roots differ or no tree is given.
    """
    if not trees:
        raise ValueError("merge needs at least one tree")
    if len({int(tree.token_ids[0]) for tree in trees}) != 1:
        raise ValueError("trees to merge must share their root token")
    if all(tree.num_nodes == 1 for tree in trees[1:]):
        return trees[0]
    token_ids = [int(trees[0].token_ids[0])]
    parents = [-1]
    scores = [1.0]
    candidates: list[Candidate] = []
    known: dict[tuple[int, int], int] = {}
    num_drafters = 0
    for tree in trees:
        place = [0]
        for node in range(1, tree.num_nodes):
            key = (place[tree.parents[node]], int(tree.token_ids[node]))
            if key not in known:
                known[key] = len(token_ids)
                token_ids.append(key[1])
                parents.append(key[0])
                scores.append(float(tree.scores[node]))
            else:
                scores[known[key]] = max(scores[known[key]], float(tree.scores[node]))
            place.append(known[key])
        candidates.extend(
            Candidate(place[c.node], c.drafter + num_drafters, c.draw, c.kind) for c in tree.candidates
        )
        num_drafters += 1 + max((c.drafter for c in tree.candidates), default=0)
    return TokenTree.build(token_ids, parents, scores, candidates)
