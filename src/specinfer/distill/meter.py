"""What a long stage shows: a live line on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


class Meter:
    """Progress of `name` from `start` to `total`, on stderr, with the time left."""

    def __init__(self, name: str, total: int, *, start: int = 0, quiet: bool = False) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._name, self._total, self._start, self._done = name, total, start, start
        self._prints = not quiet and not console.is_terminal
        self._began = self._printed = time.monotonic()
        columns = (TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=total, completed=start)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the start, never 0."""
        return max(1e-9, time.monotonic() - self._began)

    def show(self, done: int, text: str) -> None:
        """`done` of the total; text: what else there is to say."""
        self._done = done
        self._bar.update(self._task, completed=done, description=text)
        now = time.monotonic()
        if self._prints and (now - self._printed >= SECONDS_BETWEEN_LINES or done == self._total):
            self._printed = now
            left = self.seconds * (self._total - done) / max(1, done - self._start)
            print(
                f"{self._name} {done}/{self._total}, {text}, {left:.0f} s left", file=sys.stderr, flush=True
            )
