"""Engine: requests in, emissions out."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from functools import partial

from specinfer.cache import PrefixCache, SlotAllocator
from specinfer.draft.history import OwnHistories
from specinfer.engine.detokenizer import INCOMPLETE, Detokenizer
from specinfer.engine.grammars import Grammars
from specinfer.engine.parts import Emission, Parts
from specinfer.engine.request import Request, Status
from specinfer.engine.step import step
from specinfer.engine.vocabulary import bad_word_tokens, check_tokens, end_tokens
from specinfer.errors import RequestError
from specinfer.models.tokenizer import Tokenizer
from specinfer.runtime.native import own_threads
from specinfer.sampling import make_processors
from specinfer.sampling_params import SamplingParams
from specinfer.service import Service
from specinfer.structured_outputs import StructuredOutputsParams

NUM_BEFORE = 6
"""Tokens of the prompt that a text is decoded behind: enough for a character and what stands before it."""


class Engine:
    """Owns the requests. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        parts: Parts,
        tokenizer: Tokenizer | None,
        allocator: SlotAllocator,
        prefix_cache: PrefixCache | None,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        own_histories: Sequence[OwnHistories] = (),
    ) -> None:
        """end_token_ids: the model's. own_histories: of the drafts with another tokenizer."""
        self.parts = parts
        self.tokenizer = tokenizer
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.vocab_size = vocab_size
        self._end_token_ids = tuple(end_token_ids)
        self._grammars = Grammars(tokenizer)
        self.own_histories = tuple(own_histories)
        self._serial = itertools.count(1)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.parts.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.parts.scheduler.waiting or self.parts.scheduler.running)

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, service: Service | None = None
    ) -> list[Request]:
        """Queue a prompt; returns its params.n requests. Raises RequestError if it can never run."""
        requests = self.new_requests(prompt_token_ids, params, service)
        for request in requests:
            self.queue(request)
        return requests

    def new_requests(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, service: Service | None = None
    ) -> list[Request]:
        """A prompt's params.n requests, to `queue`; safe to call while another thread steps.

        Raises RequestError if it can never run.
        """
        self.check(prompt_token_ids, params)
        serial = next(self._serial)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ends = end_tokens(params, self._end_token_ids)
        bad_words = bad_word_tokens(params, self.tokenizer)
        decode = partial(self._decode, params.skip_special_tokens)
        before = prompt_token_ids[-NUM_BEFORE:]
        if decode(before).endswith(INCOMPLETE):
            before = ()
        return [
            Request(
                request_id=f"request-{serial}",
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=seed,
                sample_index=i,
                end_token_ids=ends,
                processors=make_processors(
                    params,
                    num_prompt_tokens=len(prompt_token_ids),
                    end_token_ids=ends,
                    bad_words=bad_words,
                    vocab_size=self.vocab_size,
                    matcher=None if params.form is None else self._grammars.matcher(params.form),
                ),
                detokenizer=Detokenizer(
                    decode,
                    params.stop_strings,
                    params.min_tokens,
                    params.include_stop_str_in_output,
                    before,
                ),
                service=service,
            )
            for i in range(params.n)
        ]

    def queue(self, request: Request) -> None:
        """Let a new request take part in the steps to come."""
        self.parts.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request between steps; its slots are free afterwards. Finished ones are left alone."""
        if request.status is not Status.FINISHED:
            request.abort()
            self.parts.scheduler.finish(request)

    def step(self) -> list[Emission]:
        """Run one step. One that raises (Ctrl-C, too) leaves no slot reserved: its requests can be aborted or
        stepped again."""
        with self.parts.timer.step(), own_threads(self.parts.runner):
            try:
                return step(self.parts)
            except BaseException:
                for request in self.parts.scheduler.running:
                    assert request.table is not None
                    request.table.rollback()
                raise

    def check_integrity(self) -> None:
        """Every slot is free, cached or owned by one request, exactly once; those of drafts with another
        tokenizer, too."""
        owned = [] if self.prefix_cache is None else [node.slots for node in self.prefix_cache.nodes()]
        for request in self.parts.scheduler.running:
            assert request.table is not None
            owned.append(request.table.committed[request.table.num_shared :])
            owned.append(request.table.reserved)
        self.allocator.check_integrity(owned)
        for histories in self.own_histories:
            histories.check_integrity()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError for a prompt that can never run."""
        if not prompt:
            raise RequestError("the prompt is empty", hint="give at least one token")
        bad = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt token {bad} is outside the vocabulary of {self.vocab_size}")
        room = self.max_model_len - len(prompt)
        if params.max_tokens > room:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}: "
                f"together more than the context of {self.max_model_len}",
                hint="shorten the prompt" + (f" or set max_tokens to at most {room}" if room > 0 else ""),
            )
        if len(prompt) + params.max_tokens > self.allocator.num_slots:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}: "
                f"the K/V memory holds {self.allocator.num_slots}",
                hint="raise kv_memory or lower max_tokens",
            )
        check_tokens(params, self.tokenizer, self.vocab_size, self._end_token_ids)
        if params.form is not None:
            self.check_form(params.form)

    def check_form(self, form: StructuredOutputsParams) -> None:
        """Raise RequestError unless outputs can have this form."""
        self._grammars.matcher(form)

    def _decode(self, skip_special_tokens: bool, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens) if self.tokenizer else ""
