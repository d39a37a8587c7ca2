"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from specinfer.engine.async_engine import Generation
from specinfer.outputs import CompletionOutput, TokenLogprobs
from specinfer.server.connection import STREAMED, EventStream, while_connected
from specinfer.server.logprobs import completion_logprobs, prompt_logprobs
from specinfer.server.responses import Completion, CompletionChoice
from specinfer.server.schema import CompletionBody, TokenIds
from specinfer.server.serving import Serving, as_json, finished, metrics, usage

MAX_TOKENS = 16
"""What OpenAI generates where max_tokens is left out."""


def completions_router(serving: Serving) -> APIRouter:
    """The route over one engine."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=Completion, responses=STREAMED, tags=["OpenAI"])
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or each of several: choices are sorted by prompt, then by sample."""
        serving.check_model(body.model)
        body.check()
        serving.engine.check_room()  # before the work of tokenising
        max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling_params(
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
        )
        serving.log_prompt(body.prompt)
        prompts = [await token_ids(serving, prompt) for prompt in body.prompts()]
        echoed = [
            await text(serving, p) if body.echo else "" for p in body.prompts() for _ in range(params.n)
        ]
        generation = await serving.start(body, prompts, params)
        if body.stream:
            events = stream(serving, body, generation, params.n, echoed)
            return EventStream(events, lambda: serving.engine.abort(generation))
        try:
            outputs = await while_connected(request.receive, finished(generation))
        finally:
            serving.engine.abort(generation)
        choices = [
            whole_choice(serving, body, generation, i, output, echo)
            for i, (output, echo) in enumerate(zip(outputs, echoed, strict=True))
        ]
        answer = Completion(
            **serving.head("cmpl"),
            choices=choices,
            usage=usage(generation, params.n),
            metrics=metrics(body, outputs),
        )
        return Response(as_json(answer), media_type="application/json")

    return router


def whole_choice(
    serving: Serving,
    body: CompletionBody,
    generation: Generation,
    index: int,
    output: CompletionOutput,
    echo: str,
) -> CompletionChoice:
    """One finished sample, behind its prompt where that is echoed."""
    made = CompletionChoice(
        index=index,
        text=echo + output.text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
    # The first sample of a prompt has the scores of the prompt.
    first = generation.requests[index - output.index]
    prompt_scores = first.prompt_scores()
    if output.logprobs is not None:
        tokens = output.token_ids
        scores: tuple[TokenLogprobs | None, ...] = output.logprobs
        if body.echo and prompt_scores is not None:
            tokens = (*first.tokens[: first.num_prompt_tokens], *tokens)
            scores = (*prompt_scores, *scores)
        made.logprobs = completion_logprobs(serving.engine.tokenizer, tokens, scores, body.logprobs or 0, 0)
    if body.prompt_logprobs is not None and prompt_scores is not None and output.index == 0:
        made.prompt_logprobs = prompt_logprobs(serving.engine.tokenizer, prompt_scores)
    return made


async def token_ids(serving: Serving, prompt: str | TokenIds) -> TokenIds:
    """A prompt's tokens."""
    if not isinstance(prompt, str):
        return prompt
    return await serving.engine.in_worker(serving.engine.tokenizer.encode, prompt)


async def text(serving: Serving, prompt: str | TokenIds) -> str:
    """A prompt's text."""
    if isinstance(prompt, str):
        return prompt
    return await serving.engine.in_worker(serving.decode, prompt)


async def stream(
    serving: Serving, body: CompletionBody, generation: Generation, num_samples: int, echoed: Sequence[str]
) -> AsyncGenerator[str]:
    """A chunk per request and step; the last one has the usage, where it was asked for."""
    head = serving.head("cmpl")
    for index, echo in enumerate(echoed):
        if echo:
            yield as_json(Completion(**head, choices=[CompletionChoice(index=index, text=echo)]))
    outputs = {}
    lengths = list(map(len, echoed))
    async for index, chunk in generation:
        choice = CompletionChoice(index=index, text=chunk.text)
        if chunk.logprobs is not None:
            choice.logprobs = completion_logprobs(
                serving.engine.tokenizer, chunk.token_ids, chunk.logprobs, body.logprobs or 0, lengths[index]
            )
            lengths[index] += sum(map(len, choice.logprobs.tokens))
        if chunk.output is not None:
            outputs[index] = chunk.output
            choice.finish_reason, choice.stop_reason = chunk.output.finish_reason, chunk.output.stop_reason
        elif not chunk.text and not chunk.logprobs:
            continue  # part of a character, or of what may be a stop string
        running = usage(generation, num_samples) if body.wants_running_usage else None
        yield as_json(Completion(**head, choices=[choice], usage=running))
    done = [outputs[index] for index in range(len(outputs))]
    if body.wants_usage or body.speculation.statistics:
        yield as_json(
            Completion(
                **head,
                choices=[],
                usage=usage(generation, num_samples) if body.wants_usage else None,
                metrics=metrics(body, done),
            )
        )
