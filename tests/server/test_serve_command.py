"""`specinfer serve`: the command itself."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import typer

from specinfer.cli import serve as command
from specinfer.cli.app import app, main
from specinfer.errors import ConfigError
from specinfer.server.config import ServerConfig

DEADLINE = 90.0
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_ready(url: str) -> None:
    pause, deadline = threading.Event(), time.monotonic() + DEADLINE
    while True:
        try:
            assert httpx.get(f"{url}/ready").status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            pause.wait(0.05)


def answer_while_stopping(url: str, stop: Callable[[], None]) -> None:
    """A stream that has begun is finished when the server is told to stop."""
    body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer b"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        stop()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def test_sigterm_under_load(tiny_model: Path) -> None:
    """What runs is finished, the exit is clean."""
    arguments = ["serve", str(tiny_model), "--dtype", "float32", "--port", "0", "-v"]
    process = subprocess.Popen(
        [sys.executable, "-m", "specinfer", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, command.KEYS_VARIABLE: "a,b", "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    late = threading.Timer(DEADLINE, process.kill)
    late.start()
    try:
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+", line)))
        answer_while_stopping(url, process.terminate)
        assert process.wait(DEADLINE) == 0
        log = process.stderr.read()
    finally:
        late.cancel()
        process.kill()
    assert "POST /v1/completions 200" in log and "Traceback" not in log


def test_a_log_without_room(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the log is full: requests are answered as ever."""
    port = free_port()
    failures: list[BaseException] = []

    def client() -> None:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}")
            answer_while_stopping(f"http://127.0.0.1:{port}", lambda: os.kill(os.getpid(), signal.SIGTERM))
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv(command.KEYS_VARIABLE, "b")
    thread = threading.Thread(target=client)
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing fails as writing does
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", full)
            thread.start()
            code = main(["serve", str(tiny_model), "--dtype", "float32", "--port", str(port), "-v"])
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join(DEADLINE)
        with suppress(OSError):
            full.close()
    assert not failures
    assert code == 0


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tiny_model), "--port", str(port)]) == 1
        assert capsys.readouterr().err == f"error: cannot serve on 127.0.0.1:{port}: Address already in use\n"
        assert main(["serve", str(tiny_model), "--port", "0", "--grpc-port", str(port)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: cannot serve gRPC on 127.0.0.1:{port}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port must be in [0, 65535]"),
        (["--read-timeout", "0"], "read_timeout must be a positive number"),
        (["--max-body-bytes", "0"], "max_body_bytes must be a positive integer"),
        (["--max-queue", "-1"], "--max-queue must be 0 or more"),
        (["--max-num-seqs", "0"], "max_num_seqs must be a positive integer"),
        (["-d", "none", "-d", "ngram"], "--draft none goes with no other draft"),
    ],
)
def test_bad_settings(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, arguments: list[str], words: str
) -> None:
    assert main(["serve", str(tiny_model), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_addresses_of_both_families() -> None:
    """What gRPC binds and the command shows."""
    hosts = ("127.0.0.1", "::1")
    addresses = [ServerConfig(model_name="a", host=host).address(80) for host in hosts]
    assert addresses == ["127.0.0.1:80", "[::1]:80"]


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    monkeypatch.delenv(command.KEYS_VARIABLE, raising=False)
    assert command.api_keys(None) == ()
    assert command.api_keys(path) == ("one", "two")
    monkeypatch.setenv(command.KEYS_VARIABLE, "three, four")
    assert command.api_keys(path) == ("three", "four", "one", "two")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        command.api_keys(path)


@pytest.mark.parametrize("extra", ["server", "grpc"])
def test_without_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path, extra: str
) -> None:
    missing = command.EXTRAS[extra][0]
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == missing else object())
    assert main(["serve", str(tiny_model), "--grpc-port", "0"]) == 2
    err = capsys.readouterr().err
    assert f"{missing} is not installed" in err and f"pip install 'specinfer[{extra}]'" in err


def test_every_option_is_documented_with_its_default() -> None:
    documented = dict(re.findall(r"^\| `(--[\w-]+)[^`]*` \| (.*?) \|", DOCS.read_text(), re.MULTILINE))
    found: dict[str, Any] = {
        parameter.opts[0]: parameter.default
        for parameter in typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
        if parameter.opts[0].startswith("--") and parameter.opts[0] != "--help"
    }
    shown = {
        name: "" if default is None or default is False else str(default) for name, default in found.items()
    }
    assert {name: default.strip("`") for name, default in documented.items()} == {
        name: {"True": "on", "[]": ""}.get(default, default) for name, default in shown.items()
    }
