"""Planner: trees sized by measured cost and observed acceptance, down to none (design.md 5)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specinfer.draft.costs import Costs
from specinfer.draft.gains import Gains
from specinfer.tree import Level, TokenTree
from specinfer.verify.verdict import Verdict

MAX_WIDTH = 4
LEAST = 0.02
"""Children less likely than this are not thought of."""
RATE_MEMORY = 0.95
FADE = 0.998
"""What is left of a drafter's cost after another step without it, which gives it another chance."""
REST, LONGEST_REST = 3, 24
"""Steps without a question after one in which the answer was no tree, and after many such: asking takes time,
too."""
MARGIN = 1.15
"""What is chosen is what was estimated too well: costs are taken to be so much higher."""


@dataclass
class _Step:
    """A step while its trees are made. draft_seconds: expected. level: (drafter, depth, rows, since when) of
    what is being made."""

    num_roots: int
    num_nodes: int = 0
    draft_seconds: float = 0.0
    level: tuple[int, int, int, float] | None = None
    drafters: set[int] = field(default_factory=set)


class Planner:
    """A Topology. A depth is drafted, and a child made, where what it adds is worth what it costs.

    With r tokens a second, a plan is better than what r comes from exactly if it has more tokens to expect
    than r times its seconds (Dinkelbach, Management Science 13, 1967). So children are taken by falling
    chance of acceptance as long as that exceeds r times the seconds that one more row adds to a step, and
    only if together they pay for the drafter's own forward. Costs are those of earlier steps: of all that is
    not drafting by the target's rows, of a drafter from one call of `expand` to its next.

    What it decides depends on time. Under `coupled` no token does; the other verifiers then keep the
    distribution, but a seed does not bring the same tokens back.
    """

    max_depth = 8
    num_nodes = 33

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._gains = Gains()
        self._target = Costs()
        self._drafters: dict[tuple[int, bool], Costs] = defaultdict(Costs)
        self._last_use: dict[int, int] = {}
        self._rates: dict[int, tuple[float, float]] = {}
        self._num_steps = self._rest_until = 0
        self._rest = REST
        self._step: _Step | None = None

    @property
    def is_resting(self) -> bool:
        """Whether drafters need not be asked: when they last were, nothing was worth it."""
        return self._num_steps < self._rest_until

    def expand(self, level: Level) -> NDArray[np.int64]:
        """[frontier] -> children; none at all where no depth more is worth it."""
        now, drafter = self._clock(), int(level.drafter[0])
        step = self._step
        if step is None or (level.depth == 0 and drafter in step.drafters):
            step = self._step = _Step(len(set(level.request.tolist())))
        self._close_level(step, now)
        step.drafters.add(drafter)
        num_rows, rate = step.num_roots + step.num_nodes, MARGIN * self._rate(step.num_roots)
        before = self._target.at(num_rows)
        own = self._own_seconds(drafter, level)
        value = -rate * own
        best, taken = 0.0, 0
        room = (self.num_nodes - 1) * step.num_roots - step.num_nodes
        children = self._children(drafter, level, room)
        for i, (chance, _) in enumerate(children):
            value += chance
            net = value - rate * (self._target.at(num_rows + i + 1) - before)
            if net > best:
                best, taken = net, i + 1
        counts = np.zeros(len(level.request), np.int64)
        for _, parent in children[:taken]:
            counts[parent] += 1
        if taken:
            step.num_nodes += taken
            step.draft_seconds += own
            if level.is_behind is None or not level.is_behind[counts > 0].any():
                step.level = (drafter, level.depth, int(np.count_nonzero(counts)), now)
            self._last_use[drafter] = self._num_steps
        return counts

    def observe(
        self,
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        num_rows: int,
        seconds: float,
    ) -> None:
        """What became of a step: the trees it decoded, the target's rows, and the seconds since they were
        drafted."""
        self._num_steps += 1
        self._gains.advance()
        step, self._step = self._step, None
        if step is None:
            return
        if step.num_nodes == 0:
            self._rest_until = self._num_steps + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST) if step.num_nodes == 0 else REST
        self._target.observe(num_rows, seconds)
        self._close_level(step, self._clock() - seconds)
        by_cost = sorted(step.drafters, key=lambda drafter: self._drafters[drafter, False].at(1))
        for tree, verdict in zip(trees, verdicts, strict=True):
            self._gains.observe(tree, verdict.path, by_cost)
        if num_rows == sum(tree.num_nodes for tree in trees):  # no prompt among them
            tokens, spent = self._rates.get(step.num_roots, (0.0, 0.0))
            tokens = RATE_MEMORY * tokens + sum(len(v.path) + 1 for v in verdicts)
            spent = RATE_MEMORY * spent + step.draft_seconds + self._target.at(num_rows)
            self._rates[step.num_roots] = tokens, spent

    def _children(self, drafter: int, level: Level, room: int) -> list[tuple[float, int]]:
        """(chance, parent in the frontier) of every child that could be made, the likeliest first."""
        children = []
        for parent, likelihood in enumerate(level.scores.tolist()):
            chance = 1.0
            for child in range(MAX_WIDTH):
                # A child is made after those before it, and is no likelier.
                chance = min(chance, self._gains.estimate(drafter, level.depth, likelihood, child))
                if chance < LEAST:
                    break
                children.append((chance, parent))
        return sorted(children, key=lambda child: -child[0])[:room]

    def _rate(self, num_roots: int) -> float:
        """Tokens a second that so many requests get; before they got any, what plain steps would give."""
        tokens, spent = self._rates.get(num_roots, (num_roots, self._target.at(num_roots)))
        return tokens / spent if spent else 0.0

    def _own_seconds(self, drafter: int, level: Level) -> float:
        fade: float = FADE ** self._unused(drafter)
        return fade * self._drafters[drafter, level.depth > 0].at(len(level.request))

    def _unused(self, drafter: int) -> int:
        """Steps since it was last used, this one included."""
        return self._num_steps - self._last_use.get(drafter, -1)

    def _close_level(self, step: _Step, now: float) -> None:
        if step.level is not None:
            drafter, depth, num_rows, since = step.level
            self._drafters[drafter, depth > 0].observe(num_rows, max(0.0, now - since))
            step.level = None
