"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import JsonValue
from starlette.responses import Response

from specinfer.engine.async_engine import Generation
from specinfer.errors import RequestError
from specinfer.outputs import CompletionOutput
from specinfer.server.connection import STREAMED, EventStream, while_connected
from specinfer.server.errors import ApiError
from specinfer.server.logprobs import chat_logprobs, prompt_logprobs
from specinfer.server.responses import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    FinishReason,
    ToolCall,
    ToolCallDelta,
)
from specinfer.server.schema import ChatBody
from specinfer.server.serving import Serving, as_json, finished, metrics, usage
from specinfer.server.tool_calls import Call, CallFormat, CallReader

CALL_ID_LENGTH = 9
"""Mistral's templates take no other."""


def chat_router(serving: Serving) -> APIRouter:
    """The route over one engine."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED, tags=["OpenAI"])
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        serving.check_model(body.model)
        body.check()
        serving.engine.check_room()  # before the work of tokenising
        messages = [message.for_template() for message in body.messages]
        serving.log_prompt(messages)
        tools = body.offered_tools()
        prompt = await serving.engine.in_worker(serving.engine.tokenizer.apply_chat_template, messages, tools)
        form = await serving.engine.in_worker(lambda: serving.call_format) if tools else None
        params = body.sampling_params(
            max_tokens=max_tokens(serving, body, len(prompt)),
            logprobs=body.num_logprobs,
            forced=await serving.engine.in_worker(forced_form, serving, body, form),
            **({"skip_special_tokens": False} if form and body.skip_special_tokens is None else {}),
        )
        generation = await serving.start(body, [prompt], params)
        names = [tool["function"]["name"] for tool in tools]
        readers = [CallReader(form, names, body.wants_one_call) for _ in range(params.n)]
        if body.stream:
            events = stream(serving, body, generation, readers)
            return EventStream(events, lambda: serving.engine.abort(generation))
        try:
            outputs = await while_connected(request.receive, finished(generation))
        finally:
            serving.engine.abort(generation)
        answer = ChatCompletion(
            **serving.head("chatcmpl"),
            choices=[
                whole_choice(serving, body, generation, output, reader)
                for output, reader in zip(outputs, readers, strict=True)
            ],
            usage=usage(generation, params.n),
            metrics=metrics(body, outputs),
        )
        return Response(as_json(answer), media_type="application/json")

    return router


def max_tokens(serving: Serving, body: ChatBody, num_prompt_tokens: int) -> int:
    """What the request asks for, else all that the context has left. Raises RequestError or ApiError."""
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise RequestError("max_tokens and max_completion_tokens are the same: give one of them")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is not None:
        return asked
    limit = serving.engine.max_total_tokens
    if num_prompt_tokens >= limit:
        message = (
            f"the prompt has {num_prompt_tokens} tokens: no room for an answer in the context of {limit}"
        )
        raise ApiError(400, message, param="messages", code="context_length_exceeded")
    return limit - num_prompt_tokens


def forced_form(serving: Serving, body: ChatBody, form: CallFormat | None) -> dict[str, JsonValue] | None:
    """The form of an answer that must call, as `structured_outputs`. Raises RequestError."""
    functions = body.forced_functions()
    if not functions:
        return None
    if form is None:
        raise RequestError(
            "tool_choice can't force a call: this model's chat template writes calls in no known format",
            hint="use auto or none",
        )
    return {"grammar": form.grammar(serving.engine.tokenizer, list(functions.values()), body.wants_one_call)}


def whole_choice(
    serving: Serving, body: ChatBody, generation: Generation, output: CompletionOutput, reader: CallReader
) -> ChatChoice:
    """One finished sample; the first has the scores of the prompt, where asked for."""
    prompt_scores = generation.requests[output.index].prompt_scores()
    content, calls = reader.read(output.text, is_end=True)
    message = AssistantMessage(content=content or (None if calls else ""))
    if calls:
        message.tool_calls = [ToolCall(**called(call)) for call in calls]
    made = ChatChoice(
        index=output.index,
        message=message,
        finish_reason=finish_reason(output, reader),
        stop_reason=output.stop_reason,
    )
    if output.logprobs is not None:
        made.logprobs = chat_logprobs(
            serving.engine.tokenizer, output.token_ids, output.logprobs, body.num_logprobs or 0
        )
    if prompt_scores is not None:
        made.prompt_logprobs = prompt_logprobs(serving.engine.tokenizer, prompt_scores)
    return made


def called(call: Call) -> dict[str, Any]:
    """A call as a response has it, under an id in the one form that every template takes."""
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return {"id": secrets.token_hex(5)[:CALL_ID_LENGTH], "function": function}


def finish_reason(output: CompletionOutput, reader: CallReader) -> FinishReason:
    """Why a sample ended: that it called is what OpenAI's clients look for."""
    assert output.finish_reason is not None
    return "tool_calls" if reader.num_calls and output.finish_reason == "stop" else output.finish_reason


async def stream(
    serving: Serving, body: ChatBody, generation: Generation, readers: Sequence[CallReader]
) -> AsyncGenerator[str]:
    """The role of each sample, then a chunk per sample and step; the last one has the usage, if asked for. A
    call comes whole."""
    num_samples = len(readers)
    head = serving.head("chatcmpl")
    for index in range(num_samples):
        first = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        yield as_json(ChatChunk(**head, choices=[first]))
    outputs = {}
    async for index, chunk in generation:
        reader = readers[index]
        num_before = reader.num_calls
        content, calls = reader.read(chunk.text, is_end=chunk.output is not None)
        part = ChatChunkChoice(index=index, delta=Delta(content=content))
        if calls:
            part.delta.tool_calls = [
                ToolCallDelta(index=i, **called(call)) for i, call in enumerate(calls, num_before)
            ]
        if chunk.logprobs is not None:
            part.logprobs = chat_logprobs(
                serving.engine.tokenizer, chunk.token_ids, chunk.logprobs, body.num_logprobs or 0
            )
        if chunk.output is not None:
            outputs[index] = chunk.output
            part.finish_reason = finish_reason(chunk.output, reader)
            part.stop_reason = chunk.output.stop_reason
        elif not content and not calls and not chunk.logprobs:
            continue  # part of a character, or of what may be a stop string or a call
        running = usage(generation, num_samples) if body.wants_running_usage else None
        yield as_json(ChatChunk(**head, choices=[part], usage=running))
    done = [outputs[index] for index in range(num_samples)]
    if body.wants_usage or body.speculation.statistics:
        yield as_json(
            ChatChunk(
                **head,
                choices=[],
                usage=usage(generation, num_samples) if body.wants_usage else None,
                metrics=metrics(body, done),
            )
        )
