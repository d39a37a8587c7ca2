"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds spent per phase (draft, target, verify) over all steps; the rest is what is left of `total`."""

    PHASES = ("draft", "target", "verify")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds = dict.fromkeys(self.PHASES, 0.0)
        self.total = 0.0
        self.num_steps = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of the running step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a whole step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.total += time.perf_counter() - start
            self.num_steps += 1

    @property
    def rest(self) -> float:
        """Seconds in no phase: scheduling, bookkeeping, text."""
        return self.total - sum(self.seconds.values())
