"""What a request returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """A token under the model's own distribution: natural logarithm of its probability, and its rank from 1
    (the lower id first among equals)."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""By token id: the token that came, then the likeliest ones asked for, from the top."""


@dataclass(frozen=True, kw_only=True)
class GenerationStats:
    """How one completion was made.

    num_steps: target forwards that emitted tokens (prefill chunks before the first token not counted).
    num_draft_tokens: tree nodes verified, roots excluded.
    num_accepted_tokens: draft tokens on accepted paths.
    accepted_per_depth: [i] is how often a path reached depth i + 1.
    drafted_per_depth: [i] is how often a tree had a node at depth i + 1.
    num_cached_tokens: prompt tokens found in the prefix cache.
    num_near_ties: choices that led by no more than rounding, where a model's rows don't keep their bits
        (docs/models.md); else 0.
    ttft: seconds from arrival to the first token.
    tpot: seconds per output token after the first; None with fewer than two tokens.
    """

    num_steps: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_depth: tuple[int, ...]
    drafted_per_depth: tuple[int, ...]
    num_cached_tokens: int
    num_near_ties: int
    ttft: float | None
    tpot: float | None

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted draft tokens per step, without the bonus token."""
        return self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per step, the bonus token included."""
        return acceptance_length([self])

    @property
    def acceptance_per_depth(self) -> tuple[float, ...]:
        """[i]: share of the trees that reach depth i + 1 whose accepted path does too."""
        return tuple(a / d for a, d in zip(self.accepted_per_depth, self.drafted_per_depth, strict=True))


def acceptance_length(stats: Iterable[GenerationStats]) -> float:
    """Tokens per step over several completions, the bonus tokens included; 0 without a step."""
    many = list(stats)
    num_steps = sum(s.num_steps for s in many)
    return sum(s.num_output_tokens for s in many) / num_steps if num_steps else 0.0


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample of one prompt.

    seed: the seed in force, also when none was given. index: the sample index.
    stop_reason: the stop string or token id that ended it, None at the model's end token.
    logprobs: [output tokens], None unless asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    seed: int
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All samples of one prompt, in the order of their index.

    prompt_logprobs: [prompt tokens], None for the first, which nothing precedes; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """What one step added to a stream.

    pieces: the new text cut into (text, accepted) runs; accepted text came from a draft, the rest is the
    target's own. A piece may be empty while a multi-byte character is incomplete.
    logprobs: [new tokens], None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[tuple[str, bool], ...] = field(default=())
    logprobs: tuple[TokenLogprobs, ...] | None = None
    output: CompletionOutput | None = None
    """The finished completion, on the last chunk only."""
