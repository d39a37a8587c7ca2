"""Where a step's time goes, and what a serving engine counts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

from specinfer.outputs import CompletionOutput
from specinfer.service import Service


class _Stretch:
    """Of a step, measured by `with`: a generator would take longer to enter than some phases do."""

    def __init__(self) -> None:
        self.seconds, self.start, self.end = 0.0, 0.0, 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.end = time.perf_counter()
        self.seconds += self.end - self.start


class StepTimer:
    """Seconds spent per phase (draft, target, verify) over all steps; the rest is what is left of `total`."""

    PHASES = ("draft", "target", "verify")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._phases = {name: _Stretch() for name in self.PHASES}
        self._step = _Stretch()
        self.num_steps = 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure a phase of the running step."""
        return self._phases[name]

    def since(self, name: str) -> float:
        """Seconds since a phase of the running step ended."""
        return time.perf_counter() - self._phases[name].end

    def step(self) -> AbstractContextManager[None]:
        """Measure a whole step."""
        self.num_steps += 1
        return self._step

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {name: phase.seconds for name, phase in self._phases.items()}

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return self._step.seconds

    @property
    def rest(self) -> float:
        """Seconds in no phase: scheduling, bookkeeping, text."""
        return self.total - sum(self.seconds.values())


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)


class Histogram:
    """Counts of observations up to each of `bounds`, and one count more for those above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Of what was observed; 0 before anything was."""
        return self.sum / max(1, self.count)


class ServingMetrics:
    """What a serving engine counts: integers and histograms on the host, added to once per emission.

    Seconds. ttft: arrival to first token. tpot: per token after it, once per request. itl: between two
    emissions of a request, each of one or more tokens. queue: arrival to first admission. e2e: arrival to
    end.
    accepted_per_depth: [i] is how often an accepted path reached depth i + 1.
    met, missed: finished requests by objective, "ttft" or "tpot", that asked for it.
    """

    def __init__(self) -> None:
        self.ttft, self.tpot, self.itl = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.queue, self.e2e = Histogram(SECONDS), Histogram(SECONDS)
        self.prompt_lengths, self.output_lengths = Histogram(TOKENS), Histogram(TOKENS)
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_depth: list[int] = []
        self.num_failed_steps = 0

    def observe_draft(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verified tree that had nodes below its root."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        self.accepted_per_depth.extend([0] * (num_accepted - len(self.accepted_per_depth)))
        for depth in range(num_accepted):
            self.accepted_per_depth[depth] += 1

    def observe_finished(
        self, output: CompletionOutput, num_prompt_tokens: int, e2e: float, service: Service
    ) -> None:
        """Count one request that came to its end, aborted ones included."""
        stats = output.stats
        self.finished[output.finish_reason or "error"] += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += stats.num_cached_tokens
        self.prompt_lengths.observe(num_prompt_tokens)
        self.output_lengths.observe(stats.num_output_tokens)
        self.e2e.observe(e2e)
        if stats.tpot is not None:
            self.tpot.observe(stats.tpot)
        for name, wanted, got in (("ttft", service.ttft, stats.ttft), ("tpot", service.tpot, stats.tpot)):
            if wanted is not None and got is not None:
                (self.met if got <= wanted else self.missed)[name] += 1
