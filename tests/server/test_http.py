"""What is not OpenAI's: status, tokens, keys, limits, refusals, metrics."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
MODEL = "tiny"
PROMPT = {"prompt": "Hello", "max_tokens": 4}
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, which has OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]  # type: ignore[no-any-return]


def metrics(server: Any) -> dict[str, float]:
    """Name (and the label beside the model, where there is one) to value."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL
            found["/".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def test_status_and_documentation(server: Any) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ok"}
    assert server.get("/version").json().keys() == {"version"}
    assert "/v1/chat/completions" in server.get("/openapi.json").json()["paths"]
    assert server.get("/docs").status_code == 200


def test_wrong_places(server: Any) -> None:
    assert error_of(server.get("/v2"), 404)["type"] == "not_found_error"
    error_of(server.get("/v1/completions"), 405)
    headers = {"Content-Type": "application/json"}
    body = b'{"prompt": "Hello", "model": "\\ud800"}'
    error_of(server.post("/v1/completions", content=body, headers=headers), 404)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"", 400),
        (b"[]", 422),
        (b"null", 422),
        (b'{"prompt": "a"}', 422),
    ],
)
def test_bodies_that_are_none(server: Any, body: bytes, status: int) -> None:
    headers = {"Content-Type": "text/plain" if body == b'{"prompt": "a"}' else "application/json"}
    error = error_of(server.post("/v1/completions", content=body, headers=headers), status)
    assert status == 400 or "must be a JSON object, sent with Content-Type" in error["message"]


def test_messages_that_are_none(server: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    function = {"name": "f", "arguments": '{"a": ' + "[" * 600 + "]" * 600 + "}"}
    call = {"id": "1", "type": "function", "function": function}
    for message, words in (
        ({"role": "user", "content": [image]}, "messages: a part of a message can only be text"),
        ({"role": "assistant", "tool_calls": [call]}, "the chat template refuses these messages"),
    ):
        error = error_of(server.post("/v1/chat/completions", json={"messages": [message]}), 400)
        assert words in error["message"]


def test_tokenize_and_back(server: Any) -> None:
    made = server.post("/tokenize", json={"prompt": "Hello \N{SNOWMAN}"}).json()
    assert made["count"] == len(made["tokens"]) and made["max_model_len"] == 512
    assert server.post("/detokenize", json={"tokens": made["tokens"]}).json() == {
        "prompt": "Hello \N{SNOWMAN}"
    }
    chat = server.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    text = server.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|start|>user\nHi<|end|><|start|>assistant\n"
    assert (
        "outside the vocabulary"
        in error_of(server.post("/detokenize", json={"tokens": [300]}), 400)["message"]
    )
    error_of(server.post("/tokenize", json={}), 400)


def test_metrics_count_what_happened(server: Any) -> None:
    before = metrics(server)
    body = {**LONG, "seed": 1, "n": 2, "max_tokens": 50, "ttft": 60.0, "tpot": 1e-9}
    answer = server.post("/v1/completions", json={**body, "speculation": {"statistics": True}}).json()
    server.post("/v1/completions", json={**PROMPT, "top_p": 7})
    server.post("/v1/completions", json={**PROMPT, "max_tokens": 10_000})
    after = metrics(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    speculation = answer["metrics"]["speculative_decoding"]
    expected = {
        "specinfer:requests_finished_total/length": 2,
        "vllm:request_success_total/length": 2,
        "specinfer:requests_refused_total/invalid": 1,
        "specinfer:prompt_tokens_total": 10,
        "vllm:generation_tokens_total": 100,
        "specinfer:drafts_total": speculation["num_drafts"],
        "specinfer:draft_tokens_total": speculation["num_draft_tokens"],
        "vllm:spec_decode_num_accepted_tokens_total": speculation["num_accepted_tokens"],
        "vllm:spec_decode_num_accepted_tokens_per_pos_total/0": speculation["accepted_per_pos"][0],
        "specinfer:time_to_first_token_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "specinfer:objectives_met_total/ttft": 2,
        "specinfer:objectives_missed_total/tpot": 2,
    }
    assert {name: grown.get(name) for name in expected} == expected
    assert grown["specinfer:steps_total"] > 0
    assert after["vllm:num_requests_running"] == after["specinfer:kv_cache_usage"] == 0
    shown = set(re.findall(r"specinfer:\w+", DASHBOARD.read_text()))
    assert shown and shown <= {name.partition("/")[0] for name in after}


@pytest.fixture(scope="module")
def guarded(serving: Any) -> Iterator[Any]:
    """A server with keys, a small limit and an allowed origin."""
    with serving(
        api_keys=("secret-1", "secret-2"), max_body_bytes=2000, cors_origins=("https://app.example",)
    ) as running:
        yield running


def test_keys(guarded: Any) -> None:
    for headers in ({}, {"Authorization": "Bearer secret-3"}, {"Authorization": "secret-1"}):
        for path in ("/v1/models", "/metrics", "/docs"):
            error = error_of(guarded.get(path, headers=headers), 401)
            assert error["type"] == "authentication_error"
    for key in ("secret-1", "secret-2"):
        assert guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert guarded.get("/health").status_code == guarded.get("/ready").status_code == 200


def test_large_bodies_are_refused_and_not_kept(guarded: Any) -> None:
    headers = {"Authorization": "Bearer secret-1", "Content-Type": "application/json"}
    error = error_of(guarded.post("/v1/completions", content=b" " * 5000, headers=headers), 413)
    assert "at most 2000" in error["message"]
    chunked = (b" " * 1000 for _ in range(5))
    error_of(guarded.post("/v1/completions", content=chunked, headers=headers), 413)


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.ready.port), 60)


def test_a_body_that_never_ends_is_given_up(guarded: Any) -> None:
    with connect(guarded) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-1\r\n"
            b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")  # it waits for the body
        connection.sendall(b"{")
        guarded.skip(guarded.config.read_timeout)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 30 s" in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"], ids=["nothing", "half a head"])
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
def test_a_request_that_never_begins_is_given_up(guarded: Any, sent: bytes, is_second: bool) -> None:
    with connect(guarded) as connection:
        if is_second:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(4096)
        connection.sendall(sent)
        assert guarded.get("/health").status_code == 200  # came later, so that what was sent is read
        guarded.skip(guarded.config.read_timeout)
        assert connection.recv(4096) == b""


def test_cors(guarded: Any) -> None:
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{guarded.url}/v1/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    other = {**preflight, "Origin": "https://evil.example"}
    assert httpx.options(f"{guarded.url}/v1/completions", headers=other).status_code == 400
    assert "access-control-allow-origin" in guarded.get("/v1/models", headers=preflight).headers


def test_a_request_may_take_only_so_long(server: Any) -> None:
    before = metrics(server)
    with server.held() as stepped, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", json=LONG)
        assert stepped.wait(60)
        server.skip(server.config.request_timeout)
        assert error_of(waiting.result(60), 408)["code"] == "timeout"
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as answer:
            server.skip(server.config.request_timeout)
            [event] = [line for line in answer.iter_lines() if line]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "timeout"
        server.wait_until_idle()
    aborted = "specinfer:requests_finished_total/abort"
    assert metrics(server)[aborted] == before.get(aborted, 0) + 2


def test_a_full_queue(serving: Any) -> None:
    with serving(max_queue=1, max_num_seqs=1) as server, server.client() as client:
        with server.held():
            streams = [client.completions.create(model=MODEL, stream=True, **PROMPT) for _ in range(2)]
            answer = server.post("/v1/completions", json=PROMPT)
            assert error_of(answer, 429)["type"] == "rate_limit_error"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            for stream in streams:
                stream.close()
            server.wait_until_idle()
        assert server.post("/v1/completions", json=PROMPT).status_code == 200
        assert (
            "at most 2 can run and wait"
            in error_of(server.post("/v1/completions", json={**PROMPT, "n": 3}), 400)["message"]
        )


def test_draining(serving: Any) -> None:
    with serving(max_num_seqs=1) as server, server.client() as client:
        with server.held(), httpx.Client(base_url=server.url, timeout=60) as late:
            stream = client.completions.create(
                model=MODEL, stream=True, extra_body={"ignore_eos": True}, **PROMPT
            )
            assert late.get("/health").json() == {"status": "ok"}
            server.drain()
            server.wait_until(lambda: server.front.is_draining)
            assert late.get("/health").json() == {"status": "draining"}
            error = error_of(late.post("/v1/completions", json=PROMPT), 503)
            assert error["code"] == "draining"
            error_of(late.get("/ready"), 503)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        server.join()


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_are_logged_only_if_asked(
    serving: Any, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    with serving(log_prompts=log_prompts) as server, caplog.at_level(logging.DEBUG):
        server.post("/v1/completions", json={**PROMPT, "prompt": "confidential"})
        server.post("/v1/completions", json={**PROMPT, "prompt": "confidential", "top_p": 9})
        server.post("/v1/completions", json={**PROMPT, "prompt": ["confidential", 3]})
        server.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "confidential"}]})
        server.get("/a%0aforged")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("specinfer")]
    assert any("POST /v1/completions 200" in line for line in ours)
    assert not any(line.startswith("forged") for text in ours for line in text.splitlines())
    assert any("confidential" in line for line in ours) == log_prompts
    assert "confidential" not in json.dumps([r.getMessage() for r in caplog.records]) or log_prompts
