"""Running the command in this process."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specinfer.cli.app import main
from specinfer.engine.engine import Engine
from specinfer.engine.parts import Emission
from specinfer.runtime import native


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which must be one line of JSON."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """stdout, as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def assert_error(self, code: int, *words: str | Path) -> None:
        """One line that names the thing, at most one that names the way out, nothing on stdout."""
        lines = self.err.splitlines()
        assert self.code == code, self.err
        assert self.out == ""
        assert lines[0].startswith("error: ")
        assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), self.err
        for word in words:
            assert str(word) in self.err


Run = Callable[..., Finished]


class Terminal(io.StringIO):
    """A terminal to type at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal() -> type[Terminal]:
    """at_terminal(text): a stdin where a person types."""
    return Terminal


@pytest.fixture
def specinfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """specinfer(*arguments, stdin="") runs a command line."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if native.extension() is None:
        monkeypatch.setenv(native.VARIABLE, "off")  # else every run warns of what an install without it lacks

    def run(*arguments: str | Path, stdin: str | io.StringIO = "") -> Finished:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Finished(code, *capsys.readouterr())

    return run


@pytest.fixture
def tiny(specinfer: Run, tiny_model: Path, tiny_draft: Path) -> Run:
    """tiny(command, *arguments) runs a command on the tiny model and its draft; no clock sizes the trees."""

    def run(command: str, *arguments: str | Path, stdin: str | io.StringIO = "") -> Finished:
        given = ("-m", tiny_model, "-d", tiny_draft, "--tree", "1,1")
        return specinfer(command, *given, *arguments, stdin=stdin)

    return run


@pytest.fixture
def sure(specinfer: Run, tiny_model: Path) -> Run:
    """As tiny, with the model as its own draft: greedy, every first guess is right."""

    def run(command: str, *arguments: str | Path, stdin: str | io.StringIO = "") -> Finished:
        given = ("-m", tiny_model, "-d", tiny_model, "--tree", "1,1")
        return specinfer(command, *given, *arguments, stdin=stdin)

    return run


@pytest.fixture
def press_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Engine]]:
    """press_ctrl_c(k): Ctrl-C during the k-th step from now. Returns the engines that were stepped."""
    step = Engine.step

    def press(number: int) -> list[Engine]:
        engines: list[Engine] = []

        def stepped(self: Engine) -> list[Emission]:
            engines.append(self)
            if len(engines) == number:
                signal.raise_signal(signal.SIGINT)
            return step(self)

        monkeypatch.setattr(Engine, "step", stepped)
        return engines

    return press
