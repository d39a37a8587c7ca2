"""gRPC: the same engine, the same limits."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specinfer import LLM, SamplingParams
from specinfer.server import specinfer_pb2

pb: Any = specinfer_pb2
ROOT = Path(__file__).parents[2]
METHOD = "/specinfer.v1.Inference/Generate"


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator[Any]:
    """A small one with keys, which also speaks gRPC."""
    with serving(grpc_port=0, api_keys=("secret",), max_queue=1, max_num_seqs=2) as running:
        yield running


@pytest.fixture
def channel(server: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.ready.grpc_port}") as connected:
        yield connected


def generate(channel: Any, request: Any, timeout: float = 60, key: str = "secret") -> Any:
    """The responses as they stream."""
    method = channel.unary_stream(
        METHOD,
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    return method(request, timeout=timeout, metadata=[("authorization", f"Bearer {key}")])


def failure(channel: Any, request: Any, **arguments: Any) -> Any:
    with pytest.raises(grpc.RpcError) as error:
        list(generate(channel, request, **arguments))
    return error.value


LONG = pb.GenerateRequest(text="Hello", max_tokens=500, sampling=pb.Sampling(ignore_eos=True))


def test_the_tokens_are_those_of_the_library(channel: Any, tiny_model: Path) -> None:
    sampling = pb.Sampling(seed=3, n=2, top_k=20, stop=["zz"])
    responses = list(generate(channel, pb.GenerateRequest(text="Hello", max_tokens=30, sampling=sampling)))
    params = SamplingParams(seed=3, n=2, top_k=20, stop=["zz"], max_tokens=30)
    expected = LLM(str(tiny_model), dtype="float32").generate("Hello", params)[0].outputs
    for index, output in enumerate(expected):
        own = [r for r in responses if r.index == index]
        assert "".join(r.text for r in own) == output.text
        assert tuple(t for r in own for t in r.token_ids) == output.token_ids
        assert [r.HasField("finish") for r in own] == [False] * (len(own) - 1) + [True]
        finish = own[-1].finish
        assert (finish.reason, finish.seed) == (output.finish_reason, 3)
        assert finish.num_prompt_tokens == 5 and finish.num_output_tokens == len(output.token_ids)


def test_tokens_in_and_speculation_off(channel: Any, server: Any, caplog: pytest.LogCaptureFixture) -> None:
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2, 3]), max_tokens=20, priority=-1, ttft=5.0)
    request.sampling.temperature = 0
    request.sampling.ignore_eos = True
    with caplog.at_level(logging.INFO):
        with_trees = list(generate(channel, request))
        server.wait_until(lambda: bool(caplog.messages))
    assert caplog.messages[0].startswith("gRPC Generate OK") and "[1, 2, 3]" not in caplog.text
    request.without_speculation = True
    without = list(generate(channel, request))
    assert [t for r in with_trees for t in r.token_ids] == [t for r in without for t in r.token_ids]
    assert with_trees[-1].finish.num_draft_tokens > 0
    assert without[-1].finish.num_draft_tokens == 0 and without[-1].finish.num_steps == 20


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["red", "green"]},
        {"regex": "[ab]{3}"},
        {"grammar": 'start: "a" "b"+ "c"'},
        {"json": '{"enum": [["a"], {"b": 1}]}', "disable_any_whitespace": True},
    ],
    ids=lambda form: next(iter(form)),
)
def test_structured_outputs(channel: Any, server: Any, form: dict[str, Any]) -> None:
    sampling = pb.Sampling(seed=3, structured_outputs=pb.StructuredOutputs(**form))
    responses = list(generate(channel, pb.GenerateRequest(text="Hello", max_tokens=20, sampling=sampling)))
    [request] = server.engine.new_requests(
        server.engine.tokenizer.encode("Hello"), SamplingParams(structured_outputs=form)
    )
    for token in (t for r in responses for t in r.token_ids):
        grammar = request.row().grammar
        assert grammar is not None
        banned = grammar.banned(request.tokens, ())
        assert banned is not None and not banned[token]
        request.accept([token])
    assert responses[-1].finish.reason == request.finish_reason == "stop"


def test_failures_have_their_codes(channel: Any, server: Any) -> None:
    bad = failure(channel, pb.GenerateRequest(text="Hello", sampling=pb.Sampling(top_p=2)))
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT and "top_p must be in (0, 1]" in bad.details()
    bad = failure(channel, pb.GenerateRequest(text="Hello", sampling=pb.Sampling(stop=["x"] * 65)))
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT and "at most 64" in bad.details()
    form = pb.StructuredOutputs(regex="(ab")
    bad = failure(channel, pb.GenerateRequest(text="Hello", sampling=pb.Sampling(structured_outputs=form)))
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_outputs.regex cannot be compiled" in bad.details()
    bad = failure(channel, pb.GenerateRequest())
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT and "empty" in bad.details()
    bad = failure(channel, LONG, key="wrong")
    assert bad.code() is grpc.StatusCode.UNAUTHENTICATED
    with server.held():
        running = [generate(channel, LONG) for _ in range(3)]
        server.wait_until(lambda: server.front.num_open == 3)
        full = failure(channel, LONG)
        for stream in running:
            stream.cancel()
        server.wait_until_idle()
    assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(full.trailing_metadata())["retry-after"]) >= 1
    server.engine.check_integrity()


def test_deadlines_end_requests(channel: Any, server: Any) -> None:
    aborted = server.front.metrics.finished["abort"]
    timeout = 0.1
    with server.held() as stepped:
        while not stepped.is_set():  # a deadline may pass before the request has begun
            timeout *= 2
            assert timeout < 60
            assert failure(channel, LONG, timeout=timeout).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        server.wait_until_idle()
        running = generate(channel, LONG)
        server.wait_until(lambda: server.front.num_open == 1)
        server.skip(server.config.request_timeout)
        with pytest.raises(grpc.RpcError, match="the request took longer than the server allows"):
            list(running)
        server.wait_until_idle()
    assert server.front.metrics.finished["abort"] >= aborted + 2


def test_health_and_reflection(channel: Any) -> None:
    check = health_pb2_grpc.HealthStub(channel).Check
    for service in ("", "specinfer.v1.Inference"):
        answer = check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
    names = {service.name for service in next(answers).list_services_response.service}
    assert "specinfer.v1.Inference" in names


def test_the_committed_module_is_that_of_the_proto(tmp_path: Path) -> None:
    made = tmp_path / "descriptor"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", f"--descriptor_set_out={made}"]
    subprocess.run([*command, "proto/specinfer.proto"], cwd=ROOT, check=True)
    files = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    own = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(own)
    assert without_json_names(files[0]) == without_json_names(own)


def without_json_names(file: Any) -> Any:
    """A description as the Python module has it."""
    for message in file.message_type:
        for part in (message, *message.nested_type):
            for field in part.field:
                field.ClearField("json_name")
    return file
