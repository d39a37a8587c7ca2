"""The planner in a made-up world: its clock shows what the world's costs add up to, nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specinfer import LLM, SamplingParams
from specinfer.draft.costs import Costs
from specinfer.draft.gains import Gains
from specinfer.draft.growth import GrowingTree, expand
from specinfer.draft.planner import Planner
from specinfer.tree import Candidate, CandidateKind, Level, TokenTree, merge
from specinfer.verify.verdict import Verdict

FLAT = [1.0 + 0.02 * n for n in range(200)]
STEEP = [float(n) for n in range(2000)]


class World:
    """A target whose next token is 1; each drafter has a chance to say so, and a cost a depth.

    target: seconds by rows; before: what drafting takes before the planner is asked; prompt: what a
    drafter takes to read the prompt of the next request, every 30 steps.
    """

    def __init__(
        self, target: Sequence[float], drafters: Sequence[tuple[float, float]], num_requests: int = 1
    ) -> None:
        self.now = self.num_tokens = self.before = self.prompt = 0.0
        self.num_nodes = self.num_steps = 0
        self.target, self.drafters, self.num_requests = target, list(drafters), num_requests
        self.planner = Planner(clock=lambda: self.now)
        self.rng = np.random.default_rng(0)

    def run(self, num_steps: int) -> float:
        """Tokens a second."""
        start, before = self.now, self.num_tokens
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - before) / (self.now - start)

    def step(self) -> None:
        self.num_steps += 1
        drafters = [] if self.planner.is_resting else self.drafters
        self.now += self.before
        each = [self.draft(*pair) for pair in enumerate(drafters)]
        roots = TokenTree.root_only(0)
        trees = [merge([roots, *(mine[r] for mine in each)][bool(each) :]) for r in range(self.num_requests)]
        num_rows = sum(tree.num_nodes for tree in trees)
        self.now += self.target[num_rows]
        verdicts = [Verdict(right_path(tree), 1) for tree in trees]
        self.num_tokens += sum(len(v.path) + 1 for v in verdicts)
        self.num_nodes += num_rows - self.num_requests
        self.planner.observe(trees, verdicts, num_rows, self.target[num_rows])

    def draft(self, drafter: int, nature: tuple[float, float]) -> list[TokenTree]:
        """A tree for each request: chains of right tokens, siblings and their likes wrong."""
        chance, seconds = nature
        tokens, parents, frontier = (
            [[0] for _ in range(self.num_requests)],
            [[-1] for _ in range(self.num_requests)],
            [(r, 0) for r in range(self.num_requests)],
        )
        candidates: list[list[Candidate]] = [[] for _ in range(self.num_requests)]
        for depth in range(self.planner.max_depth):
            if not frontier:
                break
            level = Level(
                depth,
                np.array([r for r, _ in frontier]),
                np.full(len(frontier), drafter),
                np.full(len(frontier), chance**depth),
                np.full(len(frontier), self.prompt > 0 and depth == 0 and self.num_steps % 30 == 1),
            )
            counts = self.planner.expand(level).tolist()
            if not any(counts):
                break
            self.now += seconds + self.prompt * bool(level.is_behind.any())
            grown = []
            for (r, node), count in zip(frontier, counts, strict=True):
                is_right = self.rng.random() < chance
                for draw in range(count):
                    tokens[r].append(1 if is_right and draw == 0 else 2 + draw)
                    parents[r].append(node)
                    child = len(tokens[r]) - 1
                    candidates[r].append(Candidate(child, 0, draw, CandidateKind.DETERMINISTIC))
                    grown.append((r, child))
            frontier = grown
        return [
            TokenTree.build(t, p, [1.0] + [chance] * (len(t) - 1), c)
            for t, p, c in zip(tokens, parents, candidates, strict=True)
        ]


def right_path(tree: TokenTree) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while (child := tree.child(path[-1] if path else 0, 1)) is not None:
        path = (*path, child)
    return path


def test_a_draft_that_is_seldom_right_is_given_up() -> None:
    world = World(FLAT, [(0.05, 0.3)])
    assert world.run(400) > 0.96 / FLAT[1]
    before = world.num_nodes
    world.run(400)
    assert world.num_nodes - before < 40  # another chance now and then


def test_a_good_draft_gets_deep_trees() -> None:
    assert World(FLAT, [(0.9, 0.05)]).run(400) > 3.0  # plain decoding gives 1.0


def test_no_tree_where_every_row_costs_as_much_as_the_first() -> None:
    world = World(STEEP, [(0.6, 0.0)], num_requests=8)
    world.run(50)
    before = world.num_nodes
    assert world.run(200) > 0.97
    assert world.num_nodes - before < 100


def test_what_became_right_is_found_again() -> None:
    world = World(FLAT, [(0.05, 0.2)])
    world.run(400)
    world.drafters = [(0.9, 0.2)]
    world.run(400)
    assert world.run(100) > 1.7  # 2.2 at best, plain decoding 1.0


def test_what_another_drafter_says_more_cheaply_is_nothing_gained() -> None:
    both = World(FLAT, [(0.7, 0.4), (0.99, 0.01)])
    one = World(FLAT, [(0.99, 0.01)])
    both.run(400)
    one.run(400)
    assert both.run(100) > 0.9 * one.run(100)


def test_tokens_are_those_of_plain_decoding(tiny_model: Path, tiny_draft: Path) -> None:
    rng = np.random.default_rng(0)
    now = np.cumsum(rng.exponential(size=100_000)).tolist()
    llm = LLM(
        str(tiny_model),
        drafts=[str(tiny_draft), "ngram"],
        tree=Planner(clock=lambda: now.pop(0)),
        dtype="float32",
        max_num_seqs=3,
    )
    prompts = [[i, 7, 9, 7] for i in range(6)]
    params = SamplingParams(seed=1, max_tokens=24, ignore_eos=True)
    got = [o.outputs[0] for o in llm.generate(prompts, params)]
    plain = LLM(str(tiny_model), dtype="float32").generate(prompts, params)
    assert [o.token_ids for o in got] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.stats.num_draft_tokens for o in got) > 0


def test_costs_lie_between_those_that_were_seen() -> None:
    costs = Costs()
    assert costs.at(5) == 0.0
    costs.observe(1, 1.0)
    costs.observe(9, 3.0)
    costs.observe(3, 50.0)  # once, while something else ran
    assert [costs.at(n) for n in (1, 5, 9)] == [1.0, 3.0, 3.0]
    assert costs.at(18) == pytest.approx(3.75)
    for _ in range(200):
        costs.observe(3, 2.0)
    assert costs.at(2) < costs.at(3) < costs.at(9)


def test_what_is_not_tried_follows_the_rest() -> None:
    """Contexts grow and are short again, and meanwhile no tree is made."""
    costs = Costs()
    for _ in range(7):
        costs.observe(4, 1.2)
    for seconds in [1.0] * 20 + [2.0] * 40 + [1.0] * 40:
        costs.observe(1, seconds)
        assert costs.at(4) < 1.5 * costs.at(1)
    assert costs.at(4) == pytest.approx(1.2, rel=0.15)


@pytest.mark.parametrize("rows", [range(1, 2), range(1, 40), range(60, 3, -7)])
def test_more_rows_never_cost_less(rows: range) -> None:
    costs = Costs()
    rng = np.random.default_rng(0)
    for _ in range(20):
        for n in rows:
            costs.observe(n, float(rng.exponential()))
    at = [costs.at(n) for n in range(1, 200)]
    assert at == sorted(at)


@pytest.mark.parametrize("max_depth", [8, 2, 1])
def test_depths_that_are_not_drafted_cost_nothing(max_depth: int) -> None:
    """A tree that has no room is not asked about: a depth's time is that of a depth that was drafted."""
    now, num_rows = 0.0, {}
    planner = Planner(clock=lambda: now)
    for _ in range(60):
        tree = GrowingTree(0, max_depth=max_depth, max_nodes=33, end_token_ids=())
        for depth in range(planner.max_depth):
            [counts] = expand(planner, depth, [tree], 0)
            if not counts:
                break
            assert depth < max_depth
            now += 0.005
            num_rows[depth > 0] = len(counts)
            for node, count in zip(tree.frontier, counts, strict=True):
                for draw in range(count):
                    tree.add(node, draw, 0.9 / (1 + draw), draw, CandidateKind.DETERMINISTIC)
            tree.advance()
        built = tree.build()
        now += 0.03
        planner.observe([built], [Verdict(right_path(built), 9)], built.num_nodes, 0.03)
    assert set(num_rows) == {False, True}.intersection([False, max_depth > 1])
    for is_deeper, n in num_rows.items():
        assert planner._drafters[0, is_deeper].at(n) == pytest.approx(0.005, rel=0.1)


def test_what_is_always_refused_is_seldom_asked() -> None:
    world = World(FLAT, [(0.0, 0.3)])
    world.run(400)
    num_asked = 0
    for _ in range(250):
        num_asked += not world.planner.is_resting
        world.step()
    assert 5 <= num_asked <= 25


@pytest.mark.parametrize(("every", "length", "then"), [(2, 60, 1000), (20, 30, 1)])
def test_a_text_is_soon_forgotten_and_what_is_usual_is_not(every: int, length: int, then: int) -> None:
    """A drafter that finds every second token, after a text of which it finds none; and one that finds every
    20th, after a text of which it finds all."""
    gains = Gains()

    def see(num_steps: int, every: int) -> float:
        for i in range(1, num_steps + 1):
            gains.advance()
            tree = TokenTree.build([0, 1], [-1, 0], [1.0, 0.5], [])
            gains.observe(tree, (1,) if i % every == 0 else (), [0])
        return gains.estimate(0, 0, 1.0, 0)

    usual = see(600, every)
    assert usual == pytest.approx(1 / every, abs=0.05)
    unusual = abs(see(length, then) - usual)
    for _ in range(150):
        gains.advance()
    left = abs(gains.estimate(0, 0, 1.0, 0) - usual)
    assert unusual > 0.3 and left < unusual / 2


@pytest.mark.parametrize(("what", "seconds"), [("prompt", 10.0), ("before", 0.8)])
def test_what_says_nothing_about_later_steps_changes_no_plan(what: str, seconds: float) -> None:
    """The time a prompt takes to read is no drafter's cost, and what runs before the first question is not
    taken off the target's."""
    world, other = World(FLAT, [(0.6, 0.2)]), World(FLAT, [(0.6, 0.2)])
    setattr(world, what, seconds)
    for each in (world, other):
        each.run(300)
    assert world.num_tokens == other.num_tokens
    assert world.num_nodes > 300


@pytest.mark.parametrize("score", [1.0, 0.9])
def test_sure_and_wrong_drafts_are_learnt_from(score: float) -> None:
    """One token may be all that a filter leaves a draft: its share is 1, and it is no forced node."""
    gains, fresh = Gains(), Gains()
    tree = GrowingTree(0, max_depth=4, max_nodes=9, end_token_ids=())
    tree.add(0, 1, score, 0, CandidateKind.DETERMINISTIC)
    for _ in range(50):
        gains.observe(tree.build(), (), [0])
    assert gains.estimate(0, 0, 1.0, 0) < 0.1 < fresh.estimate(0, 0, 1.0, 0)


def test_forced_nodes_are_nobodys() -> None:
    gains, fresh = Gains(), Gains()
    drafted = [Candidate(2, 0, 0, CandidateKind.DETERMINISTIC)]
    tree = TokenTree.build([0, 1, 2], [-1, 0, 1], [1.0, 1.0, 0.5], drafted)
    gains.observe(tree, (1,), [0])
    assert gains.estimate(0, 0, 1.0, 0) < fresh.estimate(0, 0, 1.0, 0)
    assert gains.estimate(0, 0, 1.0, 1) == fresh.estimate(0, 0, 1.0, 1)
