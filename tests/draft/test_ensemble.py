"""EnsembleDrafter: members share the nodes, and merged laws lie under the right node and drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specinfer import Chain, SamplingParams, TokenTree
from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.ensemble import EnsembleDrafter, merge_proposals
from specinfer.sampling.row import Row
from specinfer.tree import Candidate, CandidateKind, Topology

ROOT = 9


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """A small tree over few tokens, so that trees overlap, with a law for every parent that drew."""
    tokens, parents = [ROOT], [-1]
    candidates: list[Candidate] = []
    law: dict[tuple[int, int], Any] = {}
    children: dict[tuple[int, int], int] = {}
    draws: Counter[int] = Counter()
    kind = draw(st.sampled_from(CandidateKind))
    for _ in range(draw(st.integers(0, 6))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) not in children:
            children[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
        elif kind != CandidateKind.IID:
            continue
        candidates.append(Candidate(children[parent, token], 0, draws[parent], kind))
        draws[parent] += 1
        if kind != CandidateKind.DETERMINISTIC and (0, parent) not in law:
            law[0, parent] = np.random.default_rng(len(tokens)).random(3)
    scores = draw(st.lists(st.floats(0, 1), min_size=len(tokens), max_size=len(tokens)))
    tree = TokenTree.build(tokens, parents, scores, candidates)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        paths[node] = (*paths[parents[node]], tokens[node])
    built = {tree.path_tokens(node): node for node in range(tree.num_nodes)}
    return Proposal(tree, {(d, built[paths[node]]): q for (d, node), q in law.items()})


@given(st.lists(proposals(), min_size=1, max_size=4))
def test_laws_and_candidates_by_path(each: list[Proposal]) -> None:
    """Members are numbered in order, each single here; a merged node is found by its path."""
    merged = merge_proposals(each)
    paths = [merged.tree.path_tokens(node) for node in range(merged.tree.num_nodes)]
    assert set(paths) == {p.tree.path_tokens(n) for p in each for n in range(p.tree.num_nodes)}
    assert len(set(paths)) == len(paths)
    laws = {(drafter, paths[node]): q for (drafter, node), q in merged.law.items()}
    expected = {
        (number, p.tree.path_tokens(node)): q
        for number, p in enumerate(each)
        for (_, node), q in p.law.items()
    }
    assert laws.keys() == expected.keys()
    assert all(laws[key] is expected[key] for key in laws)
    assert Counter((paths[c.node], *c[1:]) for c in merged.tree.candidates) == Counter(
        (p.tree.path_tokens(c.node), number, c.draw, c.kind)
        for number, p in enumerate(each)
        for c in p.tree.candidates
    )


@given(st.lists(st.lists(proposals(), min_size=1, max_size=2), min_size=1, max_size=3))
def test_ensembles_of_ensembles(groups: list[list[Proposal]]) -> None:
    """Every candidate that was drawn still finds its law, and each q keeps its own drafter number."""
    merged = merge_proposals([merge_proposals(g) for g in groups])
    for c in merged.tree.candidates:
        parent = int(merged.tree.parents[c.node])
        assert ((c.drafter, parent) in merged.law) == (c.kind != CandidateKind.DETERMINISTIC)
    assert sum(len(p.law) for g in groups for p in g) == len(merged.law)


class Member:
    """Proposes a chain of its own token, as long as it may."""

    def __init__(self, token: int, kind: CandidateKind) -> None:
        self.kinds = frozenset({kind})
        self.token = token
        self.given: list[DraftContext] = []

    def launch(self, contexts: Sequence[DraftContext], topology: Topology) -> list[Proposal]:
        self.given = list(contexts)
        result = []
        for c in contexts:
            n = min(topology.max_depth, c.max_depth, c.max_nodes - 1)
            tree = TokenTree.build([c.tokens[-1], *[self.token] * n], list(range(-1, n)), [1.0] * (n + 1), [])
            result.append(Proposal(tree, {}))
        return result

    def collect(self, handle: list[Proposal]) -> list[Proposal]:
        return handle

    def observe(self, trees: Any, verdicts: Any) -> None:
        pass


@given(st.integers(1, 3), st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_members_share_the_nodes(num_members: int, max_nodes: list[int]) -> None:
    members = [Member(i, CandidateKind(i % 3)) for i in range(num_members)]
    ensemble = EnsembleDrafter(members)
    assert ensemble.kinds == {CandidateKind(i % 3) for i in range(num_members)}
    row = Row(SamplingParams(), 0, 0, 2, 2, (), [1, ROOT])
    contexts = [DraftContext([1, ROOT], np.arange(1), row, 6, n) for n in max_nodes]
    merged = ensemble.collect(ensemble.launch(contexts, Chain(5)))
    for (tree, law), limit in zip(merged, max_nodes, strict=True):
        shares = [(limit - 1 + num_members - 1 - i) // num_members for i in range(num_members)]
        assert sum(shares) == limit - 1
        assert law == {}
        assert tree.num_nodes == 1 + sum(min(5, share) for share in shares) <= limit
        assert len(tree.children[0]) == sum(share > 0 for share in shares)
    assert all(len(m.given) == len(contexts) for m in members)
