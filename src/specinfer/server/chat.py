"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from specinfer.engine.async_engine import Generation
from specinfer.errors import RequestError
from specinfer.outputs import CompletionOutput
from specinfer.server.connection import STREAMED, EventStream, while_connected
from specinfer.server.errors import ApiError
from specinfer.server.logprobs import chat_logprobs, prompt_logprobs
from specinfer.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
)
from specinfer.server.schema import ChatBody
from specinfer.server.serving import Serving, as_json, finished, metrics, usage


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
        prompt = await serving.engine.in_worker(
            serving.engine.tokenizer.apply_chat_template, messages, body.offered_tools()
        )
        params = body.sampling_params(
            max_tokens=max_tokens(serving, body, len(prompt)), logprobs=body.num_logprobs
        )
        generation = await serving.start(body, [prompt], params)
        if body.stream:
            events = stream(serving, body, generation, params.n)
            return EventStream(events, lambda: serving.engine.abort(generation))
        try:
            outputs = await while_connected(request.receive, finished(generation))
        finally:
            serving.engine.abort(generation)
        answer = ChatCompletion(
            **serving.head("chatcmpl"),
            choices=[whole_choice(serving, body, generation, output) for output in outputs],
            usage=usage(generation, outputs, params.n),
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


def whole_choice(
    serving: Serving, body: ChatBody, generation: Generation, output: CompletionOutput
) -> ChatChoice:
    """One finished sample; the first has the scores of the prompt, where asked for."""
    assert output.finish_reason is not None
    prompt_scores = generation.requests[output.index].prompt_scores()
    made = ChatChoice(
        index=output.index,
        message=AssistantMessage(content=output.text),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
    if output.logprobs is not None:
        made.logprobs = chat_logprobs(
            serving.engine.tokenizer, output.token_ids, output.logprobs, body.num_logprobs or 0
        )
    if prompt_scores is not None:
        made.prompt_logprobs = prompt_logprobs(serving.engine.tokenizer, prompt_scores)
    return made


async def stream(
    serving: Serving, body: ChatBody, generation: Generation, num_samples: int
) -> AsyncGenerator[str]:
    """The role of each sample, then a chunk per sample and step; the last one has the usage, if asked for."""
    head = serving.head("chatcmpl")
    for index in range(num_samples):
        first = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        yield as_json(ChatChunk(**head, choices=[first]))
    outputs = {}
    async for index, chunk in generation:
        part = ChatChunkChoice(index=index, delta=Delta(content=chunk.text))
        if chunk.logprobs is not None:
            part.logprobs = chat_logprobs(
                serving.engine.tokenizer, chunk.token_ids, chunk.logprobs, body.num_logprobs or 0
            )
        if chunk.output is not None:
            outputs[index] = chunk.output
            part.finish_reason, part.stop_reason = chunk.output.finish_reason, chunk.output.stop_reason
        elif not chunk.text and not chunk.logprobs:
            continue  # part of a character, or of what may be a stop string
        yield as_json(ChatChunk(**head, choices=[part]))
    done = [outputs[index] for index in range(num_samples)]
    if body.wants_usage or body.speculation.statistics:
        yield as_json(
            ChatChunk(
                **head,
                choices=[],
                usage=usage(generation, done, num_samples) if body.wants_usage else None,
                metrics=metrics(body, done),
            )
        )
