"""gRPC: proto/specinfer.proto over the same engine, with the standard health checking and reflection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specinfer.engine.async_engine import AsyncEngine
from specinfer.outputs import CompletionOutput, StreamChunk
from specinfer.server import specinfer_pb2
from specinfer.server.completions import MAX_TOKENS
from specinfer.server.config import ServerConfig
from specinfer.server.errors import ApiError, as_api_error
from specinfer.server.fields import SamplingFields, Speculation
from specinfer.server.guard import ApiKeys

logger = logging.getLogger(__name__)
pb: Any = specinfer_pb2
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
CLOSE_SECONDS = 5
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""By HTTP's status; any other is an invalid argument."""

LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "choice")


class Inference:
    """The service. A client's deadline or cancellation ends its requests at the next step."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._keys = ApiKeys(config.api_keys)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The handler of Generate."""
        start, code = time.perf_counter(), "gone"
        try:
            self._keys.check(str(dict(context.invocation_metadata()).get("authorization", "")))
            deadline = asyncio.get_running_loop().time() + self._config.request_timeout
            async with aclosing(self._responses(request)) as responses:
                while True:
                    async with asyncio.timeout_at(deadline):  # not around a yield: gRPC would be interrupted
                        response = await anext(responses, None)
                    if response is None:
                        break
                    yield response
            code = "OK"
        except Exception as error:
            status = as_status(as_api_error(error))
            code = status[0].name
            await context.abort(*status)
        finally:
            logger.info("gRPC Generate %s %.3f s", code, time.perf_counter() - start)

    async def _responses(self, request: Any) -> AsyncGenerator[Any]:
        sampling = fields_of(request)
        params = sampling.sampling_params(
            max_tokens=request.max_tokens if request.HasField("max_tokens") else MAX_TOKENS
        )
        self._engine.check_room()  # before the work of tokenising
        if self._config.log_prompts:
            logger.info("prompt: %r", request.text or list(request.tokens.ids))
        if request.WhichOneof("prompt") == "text":
            prompt = await self._engine.in_worker(self._engine.tokenizer.encode, request.text)
        else:
            prompt = list(request.tokens.ids)
        generation = await self._engine.generate([prompt], params, sampling.service())
        try:
            async for index, chunk in generation:
                yield response_of(index, chunk, len(prompt))
        finally:
            self._engine.abort(generation)


def fields_of(request: Any) -> SamplingFields:
    """A request's settings, checked as those of an HTTP body are. Raises ValidationError."""
    values = as_dict(request.sampling)
    if "logit_bias" in values:
        values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
    if "structured_outputs" in values:
        values["structured_outputs"] = as_dict(values["structured_outputs"])
    for name in ("priority", "ttft", "tpot"):
        if request.HasField(name):
            values[name] = getattr(request, name)
    return SamplingFields(**values, speculation=Speculation(enabled=not request.without_speculation))


def as_dict(message: Any) -> dict[str, Any]:
    """The fields that are set."""
    return {
        field.name: list(value) if field.name in LISTS else value for field, value in message.ListFields()
    }


def response_of(index: int, chunk: StreamChunk, num_prompt_tokens: int) -> Any:
    """A chunk as a message."""
    finish = None if chunk.output is None else finish_of(chunk.output, num_prompt_tokens)
    return pb.GenerateResponse(index=index, text=chunk.text, token_ids=chunk.token_ids, finish=finish)


def finish_of(output: CompletionOutput, num_prompt_tokens: int) -> Any:
    """How a sample ended."""
    stats = output.stats
    return pb.Finish(
        reason=output.finish_reason,
        stop_reason="" if output.stop_reason is None else str(output.stop_reason),
        seed=output.seed,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_steps=stats.num_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
    )


def as_status(error: ApiError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, message and trailing metadata of a failure."""
    wait = error.headers.get("Retry-After")
    trailer = (("retry-after", wait),) if wait else ()
    return CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT), error.body.error.message, trailer


@dataclass(frozen=True)
class Rpc:
    """A gRPC server that answers. drain: from now on, health checking says that it serves no more."""

    port: int
    drain: Callable[[], Awaitable[None]]


@asynccontextmanager
async def serve_grpc(engine: AsyncEngine, config: ServerConfig) -> AsyncIterator[Rpc]:
    """Serve meanwhile. Raises OSError where the port is taken."""
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", config.max_body_bytes)]
    )
    handler = grpc.unary_stream_rpc_method_handler(
        Inference(engine, config).generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    assert config.grpc_port is not None
    address = config.address(config.grpc_port)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        raise OSError(f"cannot serve gRPC on {address}: the port is taken") from None
    await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    logger.info("gRPC on port %d", port)
    try:
        yield Rpc(port, checks.enter_graceful_shutdown)
    finally:
        await server.stop(CLOSE_SECONDS)
