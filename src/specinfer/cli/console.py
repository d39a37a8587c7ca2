"""Where things are printed: data to stdout, everything else to stderr; colours only on a terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

ACCEPTED_STYLE = "green"
QUIET_STYLE = "dim"


def out() -> Console:
    """stdout. rich honours NO_COLOR, TERM and whether it is a terminal."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def err() -> Console:
    """stderr."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line on stderr."""
    err().out(text, style=QUIET_STYLE)


def print_error(message: str, hint: str | None) -> None:
    """The two lines of a failure."""
    console = err()
    for label, text, style in (("error", message, "bold red"), ("hint", hint, "bold cyan")):
        if text:
            console.out(f"{label}:", style=style, end=" ")
            console.out(text)


def write_text(console: Console, text: str, style: str = "") -> None:
    """A part of a text, at once: as it is where a program reads, harmless where a terminal shows it."""
    if console.is_terminal:
        console.out(printable(text), style=style, end="")
    else:
        console.file.write(text)
        console.file.flush()


def printable(text: str) -> str:
    """Without control characters, which could command the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0"))


def print_json(record: Mapping[str, Any]) -> None:
    """One line of JSON on stdout."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(record, ensure_ascii=not is_utf8) + "\n")
    sys.stdout.flush()


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """The package's warnings go to stderr meanwhile, and at level INFO its log."""
    logger = logging.getLogger("specinfer")
    level, propagate = logger.level, logger.propagate
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"
