"""What goes wrong in production: each with a clear answer, none takes the server down, nothing leaks."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
PROMPT = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture(autouse=True)
def check_lives(server: Any) -> Iterator[None]:
    """Whatever a test does, the server then answers as ever, idle and whole."""
    yield
    server.wait_until_idle()
    assert server.get("/health").json() == {"status": "ok"}
    assert server.post("/v1/completions", json=PROMPT).status_code == 200
    server.wait_until_idle()
    assert not server.engine.has_work and not server.front._subscriptions
    server.engine.check_integrity()


def raw(server: Any, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent, nothing read."""
    connection = socket.create_connection(("127.0.0.1", server.ready.port), 60)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    )
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


def kill(connection: socket.socket) -> None:
    """Close without a goodbye, as a process that was killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_clients_killed_in_midstream(server: Any) -> None:
    for body in ({**LONG, "stream": True, "n": 4}, {**LONG, "stream": True}):
        connection = raw(server, body)
        assert b"data:" in connection.recv(4096) + connection.recv(4096)
        kill(connection)


def test_a_client_killed_while_it_waits(server: Any) -> None:
    started = threading.Event()
    real = server.engine.step

    def step() -> Any:
        started.set()
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "step", step)
        connection = raw(server, {**LONG, "n": 8})
        assert started.wait(60)
        kill(connection)
        server.wait_until_idle()


def test_a_slow_reader_holds_nobody_up(server: Any) -> None:
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # or the system holds it all
    slow = raw(server, {**LONG, "stream": True, "n": 4})
    assert slow.recv(1)
    assert server.post("/v1/completions", json=PROMPT).status_code == 200
    rest = b"".join(iter(lambda: slow.recv(65536), b""))
    assert rest.count(b'"finish_reason":"length"') == 4
    slow.close()


def test_a_hundred_megabytes(server: Any) -> None:
    part = b" " * 2**20
    answer = server.post("/v1/completions", content=(part for _ in range(100)))
    assert answer.status_code == 413


def test_half_a_body_and_gone(server: Any) -> None:
    connection = socket.create_connection(("127.0.0.1", server.ready.port), 60)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    kill(connection)


def test_a_step_that_fails(server: Any) -> None:
    """Its requests get 500, or an error event where a stream has begun."""
    real, left, has_begun = server.engine.parts.runner.run, [16], threading.Event()

    def run(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            assert has_begun.wait(60), "16 steps gave no text"
            raise RuntimeError("secret detail")
        return real(*arguments)

    failed_before = server.front.metrics.num_failed_steps
    with pytest.MonkeyPatch.context() as patch, server.client() as client:
        patch.setattr(server.engine.parts.runner, "run", run)
        stream = iter(
            client.completions.create(
                model="tiny", stream=True, prompt="a", max_tokens=400, extra_body={"ignore_eos": True}
            )
        )
        assert next(stream).choices
        has_begun.set()
        with pytest.raises(openai.APIError, match="the step that computed this request failed: RuntimeError"):
            list(stream)
        answer = server.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
    assert server.front.metrics.num_failed_steps == failed_before + 2


def test_an_engine_that_lost_a_slot_says_so(serving: Any) -> None:
    """It can't be trusted with new requests: health tells whoever watches to start it again."""
    with serving() as broken:
        lost = broken.engine.allocator.allocate(1)
        assert broken.post("/v1/completions", json=PROMPT).status_code == 200
        broken.front._thread.join(60)
        assert broken.get("/health").status_code == 503
        assert broken.post("/v1/completions", json=PROMPT).status_code == 500
        broken.engine.allocator.free(lost)
