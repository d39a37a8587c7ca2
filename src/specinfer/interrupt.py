"""Ctrl-C between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Ctrl-C ended a command. message: what is left and how to go on."""

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message)
        self.message = message


class Interrupt:
    """is_set: whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. Who presses a second time will not wait for the step's end."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True

    def raise_if_set(self) -> None:
        """Between steps, and after the last: what Ctrl-C would have done."""
        if self.is_set:
            raise KeyboardInterrupt


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C sets a flag meanwhile, so that no step's bookkeeping is cut in two."""
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
