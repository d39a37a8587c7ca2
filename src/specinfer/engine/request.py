"""Request: one sample of one prompt on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from specinfer.cache import SlotTable
from specinfer.engine.detokenizer import Detokenizer
from specinfer.outputs import CompletionOutput, FinishReason, GenerationStats, TokenLogprobs
from specinfer.sampling import Processor, Row
from specinfer.sampling_params import SamplingParams
from specinfer.service import Service
from specinfer.tree import TokenTree


class Status(Enum):
    """Where a request is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """State of one request; the scheduler owns `status` and `table`, the step the rest.

    tokens: prompt and output. While running, the last one is the root: its text is out, its K/V is not
    written; table.num_committed counts the tokens whose K/V is.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        sample_index: int,
        end_token_ids: Sequence[int],
        processors: Sequence[Processor],
        detokenizer: Detokenizer,
        service: Service | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.num_prompt_tokens = len(prompt_token_ids)
        self.tokens = list(prompt_token_ids)
        self.end_token_ids = tuple(end_token_ids)
        self.processors = tuple(processors)
        self.detokenizer = detokenizer
        self.service = service or Service()
        self.status = Status.WAITING
        self.table: SlotTable | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.arrival = time.perf_counter()
        self.start_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.num_cached_tokens = 0
        self.num_near_ties = 0
        self.draft_notes: dict[Any, Any] = {}
        """What drafters remember about it."""
        self.is_accepted: list[bool] = []
        """Of each output token: whether a draft proposed it."""
        self.logprobs: list[TokenLogprobs] = []
        """Of each output token, where asked for."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Of the prompt's tokens so far; the first sample has them for all."""
        if params.prompt_logprobs is not None and sample_index == 0:
            self.prompt_logprobs = [None]
        self._num_steps = 0
        self._num_draft_tokens = 0
        self._accepted: list[int] = []
        self._drafted: list[int] = []

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens it may still generate."""
        return self.params.max_tokens - self.num_output_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose K/V is not written, the root included."""
        return len(self.tokens) - (self.table.num_committed if self.table is not None else 0)

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose K/V may come from the prefix cache: the root is computed, and so are prompt
        tokens whose logits are still wanted."""
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    def prompt_rows(self, trunk_len: int) -> range:
        """Positions in the next `trunk_len` tokens to compute whose logits are wanted for the prompt token
        that follows."""
        if self.prompt_logprobs is None or self.table is None:
            return range(0)
        start = self.table.num_committed
        first, last = len(self.prompt_logprobs) - 1, self.num_prompt_tokens - 1
        return range(max(start, first), min(start + trunk_len, last))

    def row(self, path: tuple[int, ...] = ()) -> Row:
        """The row of logits after the root and `path`."""
        return Row(
            self.params,
            self.seed,
            self.sample_index,
            len(self.tokens) + len(path),
            self.num_prompt_tokens,
            self.end_token_ids,
            self.tokens,
            path,
            self.processors,
        )

    def accept(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> int:
        """Take what one verification emitted (accepted draft tokens and the next token), up to what ends the
        request; returns how many were taken. logprobs: one for each token, where asked for."""
        now = time.perf_counter()
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        for taken, token in enumerate(token_ids, 1):
            self.tokens.append(token)
            self.is_accepted.append(taken < len(token_ids))
            self.logprobs += logprobs[taken - 1 : taken]
            is_end = token in self.end_token_ids
            stop = None
            if is_end and not self.params.include_stop_str_in_output:
                self.detokenizer.skip()
            else:
                stop = self.detokenizer.add(token)
            if is_end:
                is_own = token in self.params.stop_token_ids
                self._finish("stop", token if is_own else None)
            elif stop is not None:
                self._finish("stop", stop)
            elif self.num_remaining == 0:
                self._finish("length", None)
            if self.finish_reason is not None:
                return taken
        return len(token_ids)

    def abort(self) -> None:
        """End it where it stands."""
        self._finish("abort", None)

    def observe(self, tree: TokenTree, num_accepted: int) -> None:
        """Count one verification."""
        self._num_steps += 1
        self._num_draft_tokens += tree.num_draft_tokens
        for counts, depth in ((self._drafted, tree.max_depth), (self._accepted, num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for i in range(depth):
                counts[i] += 1

    def completion(self) -> CompletionOutput:
        """What it has come to."""
        return CompletionOutput(
            index=self.sample_index,
            text=self.detokenizer.text,
            token_ids=tuple(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            stats=self._stats(),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
        )

    def prompt_scores(self) -> tuple[TokenLogprobs | None, ...] | None:
        """[prompt tokens] log probabilities, None unless asked for (and in samples after the first)."""
        return None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if not isinstance(stop_reason, str):
            late = self.detokenizer.flush()
            if late is not None:
                self.finish_reason, self.stop_reason = "stop", late

    def _stats(self) -> GenerationStats:
        first, last, n = self.first_token_time, self.last_token_time, self.num_output_tokens
        return GenerationStats(
            num_steps=self._num_steps,
            num_output_tokens=n,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted),
            accepted_per_depth=tuple(self._accepted + [0] * (len(self._drafted) - len(self._accepted))),
            drafted_per_depth=tuple(self._drafted),
            num_cached_tokens=self.num_cached_tokens,
            num_near_ties=self.num_near_ties,
            ttft=None if first is None else first - self.arrival,
            tpot=None if first is None or last is None or n < 2 else (last - first) / (n - 1),
        )
