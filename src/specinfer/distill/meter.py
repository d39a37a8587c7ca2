"""What a long stage shows: a live line on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


class Meter:
    """Progress of `name` from `start` to `total`, on stderr, with the time left; its last line stays."""

    def __init__(self, name: str, total: int, *, start: int = 0, quiet: bool = False) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._name, self._total, self._start = name, total, start
        self._quiet, self._is_live = quiet, console.is_terminal
        self._began = self._printed = time.monotonic()
        self._line = ""
        columns = (TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        hidden = quiet or not self._is_live
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=total, completed=start)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._print(self._line)

    @property
    def seconds(self) -> float:
        """Since the start, never 0."""
        return max(1e-9, time.monotonic() - self._began)

    def show(self, done: int, text: str) -> None:
        """`done` of the total; text: what else there is to say."""
        self._bar.update(self._task, completed=done, description=text)
        self._line = f"{self._name} {done}/{self._total}, {text}"
        if not self._is_live and time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            left = self.seconds * (self._total - done) / max(1, done - self._start)
            self._print(f"{self._line}, {left:.0f} s left")

    def _print(self, line: str) -> None:
        if line and not self._quiet:
            print(line, file=sys.stderr, flush=True)
