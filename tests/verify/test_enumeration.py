"""The stochastic verifiers are exact: every branch of the shipped code and every draw, enumerated.

design.md 2 lists ways of making children that are known to bias the output; the same code must show it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specinfer.tree import Candidate, CandidateKind, TokenTree, merge
from specinfer.verify import Coin, DraftLaw, RandomCoin, Verdict, multi_step, without_replacement

Tokens = tuple[int, ...]
Law = Callable[[Tokens], NDArray[np.float64]]
"""Path tokens below the root -> the next token's distribution."""
Rule = Callable[[TokenTree, DraftLaw, NDArray[np.float64], Coin], Verdict]

IID = CandidateKind.IID
WR = CandidateKind.WITHOUT_REPLACEMENT
DET = CandidateKind.DETERMINISTIC
RULES: dict[CandidateKind, Rule] = {IID: multi_step, WR: without_replacement}
EXACT = 1e-12
WRONG = 0.01


class EnumeratingCoin:
    """Replays a script of choices, takes the first possible one beyond its end, and notes the others."""

    def __init__(self, script: Tokens) -> None:
        self._script = script
        self._chosen: list[int] = []
        self.weight = 1.0
        self.others: list[Tokens] = []

    def accept(self, ratio: float) -> bool:
        probability = min(1.0, ratio)
        return self._choose([1.0 - probability, probability]) == 1

    def draw(self, weights: NDArray[np.float64]) -> int:
        return self._choose((weights / weights.sum()).tolist())

    def _choose(self, weights: Sequence[float]) -> int:
        if len(self._chosen) < len(self._script):
            choice = self._script[len(self._chosen)]
        else:
            choice, *others = (i for i, weight in enumerate(weights) if weight > 0.0)
            self.others += [(*self._chosen, other) for other in others]
        self.weight *= weights[choice]
        self._chosen.append(choice)
        return choice


def verdicts(
    rule: Rule, tree: TokenTree, law: DraftLaw, p: NDArray[np.float64]
) -> Iterator[tuple[float, Verdict]]:
    """Every verdict with its probability."""
    pending: list[Tokens] = [()]
    while pending:
        coin = EnumeratingCoin(pending.pop())
        verdict = rule(tree, law, p, coin)
        pending += coin.others
        yield coin.weight, verdict


def random_law(seed: int, vocab: int, holes: float = 0.0) -> Law:
    """A different distribution after every path; each token has probability 0 with probability `holes`."""

    def law(path: Tokens) -> NDArray[np.float64]:
        generator = np.random.default_rng([seed, len(path), *path])
        weights = generator.dirichlet(np.full(vocab, 0.7)) + 1e-3
        weights[generator.random(vocab) < holes] = 0.0
        weights[generator.integers(vocab)] += 0.1
        result: NDArray[np.float64] = weights / weights.sum()
        return result

    known: dict[Tokens, NDArray[np.float64]] = {}
    return lambda path: known[path] if path in known else known.setdefault(path, law(path))


Children = list[tuple[int, CandidateKind]]
"""A node's candidates in draw order."""
Spoil = Callable[[Children, NDArray[np.float64]], Children]


@dataclass(frozen=True)
class Draft:
    """A drafter whose every draw is enumerated. plan: per depth, (kind, how many) in draw order.

    spoil: what a wrong implementation does to a node's candidates; recorded: what it writes down as q.
    """

    law: Law
    plan: tuple[tuple[tuple[CandidateKind, int], ...], ...]
    spoil: Spoil = field(default=lambda children, q: children)
    recorded: Callable[[NDArray[np.float64]], NDArray[np.float64]] = field(default=lambda q: q)

    def children(self, path: Tokens) -> Iterator[tuple[float, Children]]:
        """Every list of candidates of one node, with its probability."""
        q = self.law(path)
        parts = [list(draws(q, kind, count)) for kind, count in self.plan[len(path)]]
        kinds = [kind for kind, _ in self.plan[len(path)]]
        for combination in itertools.product(*parts):
            weight = float(np.prod([w for w, _ in combination]))
            made = [(t, kind) for (_, tokens), kind in zip(combination, kinds, strict=True) for t in tokens]
            yield weight, self.spoil(made, q)

    def trees(self) -> Iterator[tuple[float, TokenTree]]:
        """Every tree, with its probability."""
        yield from self._grow(0, 1.0, [-1], [()], [])

    def _grow(
        self, node: int, weight: float, parents: list[int], paths: list[Tokens], candidates: list[Candidate]
    ) -> Iterator[tuple[float, TokenTree]]:
        while node < len(parents) and len(paths[node]) == len(self.plan):
            node += 1
        if node == len(parents):
            tokens = [0, *(path[-1] for path in paths[1:])]
            # Scores that have nothing to do with the order of the draws.
            scores = [1.0, *(((7 * token + 3) % 5) / 5 for token in tokens[1:])]
            yield weight, TokenTree.build(tokens, parents, scores, candidates)
            return
        for w, children in self.children(paths[node]):
            new_parents, new_paths, new_candidates = parents[:], paths[:], candidates[:]
            place: dict[int, int] = {}
            for draw, (token, kind) in enumerate(children):
                if token not in place:
                    place[token] = len(new_parents)
                    new_parents.append(node)
                    new_paths.append((*paths[node], token))
                new_candidates.append(Candidate(place[token], 0, draw, kind))
            yield from self._grow(node + 1, weight * w, new_parents, new_paths, new_candidates)


def draws(q: NDArray[np.float64], kind: CandidateKind, count: int) -> Iterator[tuple[float, Tokens]]:
    """Every outcome of `count` draws."""
    if kind == DET:
        yield 1.0, tuple(int(t) for t in np.argsort(-q, kind="stable")[:count])
    elif count == 0 or not q.any():
        yield 1.0, ()
    else:
        for token in np.flatnonzero(q):
            rest = q.copy()
            if kind == WR:
                rest[token] = 0.0
                rest /= rest.sum() or 1.0
            for weight, later in draws(rest, kind, count - 1):
                yield float(q[token]) * weight, (int(token), *later)


def distance(rule: Rule, target: Law, vocab: int, drafts: Sequence[Draft]) -> float:
    """Total variation between what comes out and the target's own joint distribution.

    One step emits path and next token; the target goes on from there, up to the longest a step can emit.
    """
    length = 1 + max(len(draft.plan) for draft in drafts)
    ways = np.zeros(vocab**length)
    going_on = {
        prefix: continuation(target, vocab, prefix, length)
        for n in range(length + 1)
        for prefix in itertools.product(range(vocab), repeat=n)
    }
    for combination in itertools.product(*([*draft.trees()] for draft in drafts)):
        tree = merge([tree for _, tree in combination])
        weight = float(np.prod([w for w, _ in combination]))
        paths = [tree.path_tokens(node) for node in range(tree.num_nodes)]
        p = np.stack([target(path) for path in paths])
        law: Mapping[tuple[int, int], NDArray[np.float64]] = {
            (drafter, node): draft.recorded(draft.law(path))
            for drafter, draft in enumerate(drafts)
            for node, path in enumerate(paths)
        }
        for w, verdict in verdicts(rule, tree, law, p):
            emitted = (*(int(tree.token_ids[node]) for node in verdict.path), verdict.next_token)
            rest = going_on[emitted]
            start = sum(token * vocab ** (length - 1 - i) for i, token in enumerate(emitted))
            ways[start : start + len(rest)] += weight * w * rest
    return float(np.abs(ways - going_on[()]).sum() / 2)


def measured(*args: Any) -> float:
    """`distance`, printed: `pytest -rP` shows the figures of every case."""
    value = distance(*args)
    print(f"total variation {value:.1e}")
    return value


def continuation(target: Law, vocab: int, prefix: Tokens, length: int) -> NDArray[np.float64]:
    """[vocab ** (length - len(prefix))], the target's law of what follows `prefix`."""
    if len(prefix) == length:
        return np.ones(1)
    parts = [q * continuation(target, vocab, (*prefix, t), length) for t, q in enumerate(target(prefix))]
    return np.concatenate(parts)


def levels(spec: str, sampled: CandidateKind) -> tuple[tuple[tuple[CandidateKind, int], ...], ...]:
    """In "s2 d1,d2", the first depth has two draws and the likeliest token; the second the two likeliest."""
    kinds = {"s": sampled, "d": DET}
    return tuple(
        tuple((kinds[part[0]], int(part[1:])) for part in level.split()) for level in spec.split(",")
    )


each_rule = pytest.mark.parametrize("sampled", RULES, ids=[rule.__name__ for rule in RULES.values()])


@pytest.mark.parametrize("holes", [0.0, 0.4], ids=["full", "zeros"])
@pytest.mark.parametrize(
    ("vocab", "spec"),
    [
        (4, "s1"),
        (4, "s4"),
        (2, "s8"),
        (4, "s2,s1"),
        (3, "s2,s3"),
        (3, "s1,s2,s1"),
        (3, "s1,s1,s1,s1"),
        (2, "s2,s1,s1"),
        (4, "d2,d2,d1"),
        (4, "d1 s2,s1"),
        (3, "s2 d1,d1 s1"),
        (4, "d2,s2"),
        (4, "s2,d2"),
    ],
)
@each_rule
def test_one_drafter_is_exact(sampled, vocab, spec, holes):
    drafts = [Draft(random_law(2, vocab, holes), levels(spec, sampled))]
    assert measured(RULES[sampled], random_law(1, vocab, holes), vocab, drafts) < EXACT


@pytest.mark.parametrize(
    ("vocab", "first", "second"),
    [
        (4, "s2", "s2"),
        (2, "s2,s1", "s2,s1"),
        (3, "s2,s1", "s1,s1"),
        (3, "s1,s1", "s1,s1,s1"),
        (3, "s2,s1", "d2,d1"),
        (3, "d1,d1", "s2,s1"),
        (3, "d2 s1,s1", "s1,d2"),
    ],
)
@each_rule
def test_two_merged_drafters_are_exact(sampled, vocab, first, second):
    drafts = [
        Draft(random_law(2, vocab), levels(first, sampled)),
        Draft(random_law(3, vocab, 0.3), levels(second, sampled)),
    ]
    assert measured(RULES[sampled], random_law(1, vocab), vocab, drafts) < EXACT


@each_rule
def test_a_perfect_draft_and_a_certain_target_are_exact(sampled):
    """Where p = q, or p is one-hot, residuals are empty but for rounding."""
    law = random_law(1, 3)
    assert measured(RULES[sampled], law, 3, [Draft(law, levels("s2,s2", sampled))]) < EXACT

    def certain(path: Tokens) -> NDArray[np.float64]:
        return np.eye(3)[len(path) % 3]

    for draft_law in (law, certain):
        assert measured(RULES[sampled], certain, 3, [Draft(draft_law, levels("s2 d1,s1", sampled))]) < EXACT


def top_k(children: Children, q: NDArray[np.float64]) -> Children:
    best = np.argsort(-q, kind="stable")[: len(children)]
    return [(int(token), kind) for token, (_, kind) in zip(best, children, strict=True)]


def sorted_by_q(children: Children, q: NDArray[np.float64]) -> Children:
    return sorted(children, key=lambda child: -q[child[0]])


def pruned(children: Children, q: NDArray[np.float64]) -> Children:
    return sorted_by_q(children, q)[:1]


def deduplicated(children: Children, q: NDArray[np.float64]) -> Children:
    return list(dict.fromkeys(children))


def hotter(q: NDArray[np.float64]) -> NDArray[np.float64]:
    flat = np.where(q > 0.0, np.maximum(q, 1e-300) ** 0.5, 0.0)
    result: NDArray[np.float64] = flat / flat.sum()
    return result


def wrong_distance(sampled: CandidateKind, **mistake: Any) -> float:
    """The largest over a few laws, for a bias may vanish by chance in one. Two children of the root, as in
    design.md's table; the same draft without the mistake is exact."""
    distances = []
    for seed in range(10, 15):
        right = Draft(random_law(seed + 10, 5), levels("s2", sampled))
        wrong = dataclasses.replace(right, **mistake)
        assert measured(RULES[sampled], random_law(seed, 5), 5, [right]) < EXACT
        distances.append(measured(RULES[sampled], random_law(seed, 5), 5, [wrong]))
    return max(distances)


@pytest.mark.parametrize("spoil", [top_k, sorted_by_q, pruned, deduplicated])
def test_multi_step_fails_on_children_not_made_as_it_assumes(spoil):
    assert wrong_distance(IID, spoil=spoil) > WRONG


@pytest.mark.parametrize("spoil", [top_k, sorted_by_q, pruned])
def test_without_replacement_fails_on_children_not_made_as_it_assumes(spoil):
    assert wrong_distance(WR, spoil=spoil) > WRONG


@each_rule
def test_a_law_recorded_at_another_temperature_fails(sampled):
    assert wrong_distance(sampled, recorded=hotter) > WRONG


def test_draws_of_the_other_kind_fail():
    """What check_kinds guards against: each rule fed the other's draws under its own label."""

    def relabelled(kind: CandidateKind) -> Spoil:
        return lambda children, q: [(token, kind) for token, _ in children]

    for sampled, other in ((IID, WR), (WR, IID)):
        draft = Draft(random_law(20, 4), levels("s2,s1", other), relabelled(sampled))
        assert measured(RULES[sampled], random_law(10, 4), 4, [draft]) > WRONG


@each_rule
def test_taking_the_first_child_unseen_fails(sampled):
    class FirstUnseen:
        def __init__(self, coin: Coin) -> None:
            self.coin, self.seen, self.draw = coin, False, coin.draw

        def accept(self, ratio: float) -> bool:
            self.seen, was_seen = True, self.seen
            return self.coin.accept(ratio) if was_seen else True

    def rule(tree: TokenTree, law: DraftLaw, p: NDArray[np.float64], coin: Coin) -> Verdict:
        return RULES[sampled](tree, law, p, FirstUnseen(coin))

    drafts = [Draft(random_law(2, 3), levels("s2,s1", sampled))]
    assert measured(rule, random_law(1, 3), 3, drafts) > WRONG


class ZeroGenerator(np.random.Generator):
    """Every uniform number is 0, the least that `random` may return."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def random(self, *args: Any, **kwargs: Any) -> Any:
        return 0.0


class LaxCoin(RandomCoin):
    """Accepts at u <= ratio, the mistake that lets an impossible token through at u = 0."""

    def accept(self, ratio: float) -> bool:
        return self._generator.random() <= ratio


@pytest.mark.parametrize("kind", [IID, WR, DET])
def test_an_impossible_token_never_passes(kind):
    rule = RULES.get(kind, multi_step)
    tree = TokenTree.build([0, 1], [-1, 0], [1.0, 0.9], [Candidate(1, 0, 0, kind)])
    p = np.array([[0.5, 0.0, 0.5], [0.2, 0.4, 0.4]])
    law = {(0, 0): np.array([0.1, 0.8, 0.1])}
    assert rule(tree, law, p, RandomCoin(ZeroGenerator)) == Verdict((), 0)
    assert rule(tree, law, p, LaxCoin(ZeroGenerator)).path == (1,)
    assert [verdict.path for _, verdict in verdicts(rule, tree, law, p)] == [(), ()]


@each_rule
def test_the_order_in_which_nodes_and_candidates_are_stored_means_nothing(sampled):
    """A tree put together by hand, its candidates listed backwards: same verdicts, same probabilities."""
    target, q = random_law(1, 4), random_law(2, 4)
    candidates = [Candidate(node, drafter, node, sampled) for drafter in (0, 1) for node in (1, 2, 3)]
    results = []
    for scores, step in (([0.1, 0.2, 0.3], 1), ([0.3, 0.2, 0.1], -1)):
        tree = TokenTree.build([0, 1, 2, 3], [-1, 0, 0, 0], [1.0, *scores], candidates)
        tree = dataclasses.replace(tree, candidates=tree.candidates[::step])
        p = np.stack([target(tree.path_tokens(node)) for node in range(4)])
        law = {(0, 0): q(()), (1, 0): target(())}
        outcome: dict[Tokens, float] = {}
        for weight, verdict in verdicts(RULES[sampled], tree, law, p):
            emitted = (*(int(tree.token_ids[node]) for node in verdict.path), verdict.next_token)
            outcome[emitted] = outcome.get(emitted, 0.0) + weight
        results.append(outcome)
    assert results[0] == pytest.approx(results[1], abs=1e-14)


def test_candidates_a_rule_cannot_judge_are_refused():
    for rule, kind in ((multi_step, WR), (without_replacement, IID)):
        tree = TokenTree.build([0, 1], [-1, 0], [1.0, 0.9], [Candidate(1, 0, 0, kind)])
        with pytest.raises(ValueError, match=kind.name):
            rule(tree, {}, np.full((2, 2), 0.5), RandomCoin(lambda: np.random.default_rng(0)))
