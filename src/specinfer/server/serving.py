"""Serving: one engine as the handlers use it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

from specinfer.engine.async_engine import AsyncEngine, Generation
from specinfer.errors import RequestError
from specinfer.outputs import CompletionOutput
from specinfer.sampling_params import SamplingParams
from specinfer.server.config import ServerConfig
from specinfer.server.errors import ApiError
from specinfer.server.responses import (
    CachedTokens,
    ChatChunk,
    ChatCompletion,
    Completion,
    Metrics,
    SpeculationStats,
    Usage,
)
from specinfer.server.schema import GenerationBody
from specinfer.server.tool_calls import CallFormat, call_format
from specinfer.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)
VERSION = version("specinfer")


@dataclass(frozen=True)
class Serving:
    """The engine, how it is served, and since when (Unix seconds)."""

    engine: AsyncEngine
    config: ServerConfig
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not the one served."""
        if name is not None and name != self.config.model_name:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls; the first look takes milliseconds."""
        return call_format(self.engine.tokenizer)

    def head(self, prefix: str) -> dict[str, Any]:
        """The fields that every chunk of one response shares."""
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.config.model_name,
            "system_fingerprint": f"specinfer-{VERSION}",
        }

    async def start(
        self, body: GenerationBody, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> Generation:
        """Queue a request's prompts; the caller aborts the generation when it is done with it.

        Raises ApiError, RequestError, OverloadError, DrainingError or StepError.
        """
        await self.engine.in_worker(self.check_schemas, body)
        try:
            return await self.engine.generate(prompts, params, body.service())
        except RequestError as error:
            longest = max(map(len, prompts))
            if longest + params.max_tokens > self.engine.max_total_tokens:
                raise ApiError(400, str(error), param="max_tokens", code="context_length_exceeded") from None
            raise

    def check_schemas(self, body: GenerationBody) -> None:
        """Raise RequestError for one that can't be met, by the name that the client gave it."""
        for name, schema in body.schemas().items():
            try:
                self.engine.check_form(StructuredOutputsParams(json=schema))
            except RequestError as error:
                message = error.message.replace("structured_outputs.json", name, 1)
                raise RequestError(message, error.hint) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special ones included. Raises RequestError for ids outside the vocabulary."""
        size = self.engine.vocab_size
        bad = next((t for t in token_ids if not 0 <= t < size), None)
        if bad is not None:
            raise RequestError(f"token {bad} is outside the vocabulary of {size}")
        return self.engine.tokenizer.decode(token_ids, skip_special_tokens=False)

    def log_prompt(self, prompt: object) -> None:
        """Only where it was asked for."""
        if self.config.log_prompts:
            logger.info("prompt: %r", prompt)


def as_json(answer: Completion | ChatCompletion | ChatChunk) -> str:
    """A response or a chunk, its metrics only where it has some."""
    return answer.model_dump_json(exclude={"metrics"} if answer.metrics is None else None)


async def finished(generation: Generation) -> list[CompletionOutput]:
    """The outputs of all requests, in their order."""
    outputs: dict[int, CompletionOutput] = {}
    async for index, chunk in generation:
        if chunk.output is not None:
            outputs[index] = chunk.output
    return [outputs[index] for index in range(len(generation.requests))]


def usage(generation: Generation, num_samples: int) -> Usage:
    """As far as its chunks were taken. A prompt counts once, however many samples it has."""
    firsts = generation.requests[::num_samples]
    prompt_tokens = sum(r.num_prompt_tokens for r in firsts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=generation.num_output_tokens,
        total_tokens=prompt_tokens + generation.num_output_tokens,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(r.num_cached_tokens for r in firsts)),
    )


def metrics(body: GenerationBody, outputs: Sequence[CompletionOutput]) -> Metrics | None:
    """How speculation went, where the request asked."""
    if not body.speculation.statistics:
        return None
    stats = [o.stats for o in outputs]
    drafted = sum_by_depth([s.drafted_per_depth for s in stats])
    return Metrics(
        speculative_decoding=SpeculationStats(
            num_steps=sum(s.num_steps for s in stats),
            num_drafts=sum(drafted[:1]),
            num_draft_tokens=sum(s.num_draft_tokens for s in stats),
            num_accepted_tokens=sum(s.num_accepted_tokens for s in stats),
            accepted_per_pos=sum_by_depth([s.accepted_per_depth for s in stats]),
            drafted_per_pos=drafted,
        )
    )


def sum_by_depth(counts: Sequence[Sequence[int]]) -> list[int]:
    """[depth]: the sum over requests, of which some went deeper than others."""
    depth = max(map(len, counts), default=0)
    return [sum(c[i] for c in counts if i < len(c)) for i in range(depth)]
