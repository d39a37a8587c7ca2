"""What a request asks for. Names and meanings follow vLLM's SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specinfer.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, validated on construction.

    temperature: 0 is greedy; any value above is a divisor of the logits.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: names the noise; None draws a fresh one, which the result reports.
    max_tokens, min_tokens: limits on the generated tokens; end tokens are banned below min_tokens, and stop
        strings end nothing.
    ignore_eos: do not end at the model's end token.
    stop: strings that end the text (and are cut from it).
    stop_token_ids: tokens that end the text, beside the model's own.
    n: number of independent samples of the same prompt.

    Raises RequestError naming the field and its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    n: int = 1

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, 0, 2**31 - 1)
        check_float("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_int("n", self.n, 1, 1024)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = tuple(stop) if isinstance(stop, Iterable) else ("",)
        if not all(isinstance(s, str) and s for s in stop):
            raise RequestError("stop must be non-empty strings", hint="leave stop out for no stop strings")
        if not isinstance(self.stop_token_ids, Iterable):
            raise RequestError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        ids = tuple(self.stop_token_ids)
        for token in ids:
            check_int("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its one canonical form."""
        return tuple(self.stop)


def check_float(name: str, value: object, low: float, high: float, *, exclusive_low: bool = False) -> None:
    """Raise RequestError unless `value` is a finite number in [low, high] (or (low, high])."""
    bounds = f"{'(' if exclusive_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise RequestError(f"{name} must be a number in {bounds}, got {value!r}")
    if value < low or value > high or (exclusive_low and value == low):
        raise RequestError(f"{name} must be in {bounds}, got {value:g}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise RequestError unless `value` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    if value < low or value > high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}")
