"""What a request asks for. Names and meanings follow vLLM's SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from specinfer.errors import RequestError, check_names
from specinfer.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, validated on construction.

    temperature: 0 is greedy; any value above is a divisor of the logits.
    top_k: keep the k likeliest tokens; 0 keeps all, and so does -1, which becomes 0.
    top_p: keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    typical_p: keep the smallest set of tokens whose information is nearest to the entropy and whose
        probability reaches it, in (0, 1] (Meister et al., "Locally typical sampling", 2023).
    repetition_penalty: divides the positive logits of tokens in prompt or output and multiplies negative
        ones, in [0.01, 100]; 1 does nothing.
    presence_penalty, frequency_penalty: taken off the logits of generated tokens, once and for each time, in
        [-2, 2].
    logit_bias: token id -> what is added to its logit, in [-100, 100], or -inf, which bans it. Kept as pairs.
    allowed_token_ids: the only tokens there are; None is all of them.
    bad_words: texts whose usual tokens, at a start, within a text and after a space, are never generated in a
        row.
    structured_outputs: the form of the output (StructuredOutputsParams, or a mapping of its fields). It ends
        where its form may end, and nothing else breaks it: max_tokens, stop strings and stop tokens can cut
        it off, and where what stands above and min_tokens ban all tokens that it allows, they are not heard.
    seed: names the noise; None draws a fresh one, which the result reports.
    max_tokens, min_tokens: limits on the generated tokens; end tokens are banned below min_tokens, and stop
        strings end nothing.
    ignore_eos: do not end at the model's end token.
    stop: strings that end the text (and are cut from it).
    stop_token_ids: tokens that end the text, beside the model's own.
    include_stop_str_in_output: let the text end with the stop string, or with the end token's text.
    skip_special_tokens: leave special tokens out of the text.
    logprobs: log probabilities of each output token and of the likeliest ones, this many, in [0, 20]; None
        for none. They are the model's own, before any of the above.
    prompt_logprobs: the same for the prompt's tokens.
    n: number of independent samples of the same prompt.

    Raises RequestError naming the field and its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __new__(cls, **given: object) -> Self:
        check_names(given, cls, RequestError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("typical_p", self.typical_p, 0.0, 1.0, exclusive_low=True)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_int("n", self.n, 1, 1024)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        canonical: dict[str, object] = {
            "top_k": max(self.top_k, 0),
            "stop": as_strings("stop", self.stop),
            "bad_words": as_strings("bad_words", self.bad_words),
            "stop_token_ids": as_token_ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": as_biases(self.logit_bias),
        }
        if self.allowed_token_ids is not None:
            canonical["allowed_token_ids"] = as_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not canonical["allowed_token_ids"]:
                raise RequestError("allowed_token_ids is empty", hint="leave it out to allow every token")
        if self.structured_outputs is not None:
            canonical["structured_outputs"] = StructuredOutputsParams.of(self.structured_outputs)
            if self.ignore_eos:
                raise RequestError("structured_outputs end at an end token", hint="leave ignore_eos out")
        for name, value in canonical.items():
            object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its one canonical form."""
        return tuple(self.stop)

    @property
    def form(self) -> StructuredOutputsParams | None:
        """`structured_outputs` in its one canonical form."""
        return (
            None if self.structured_outputs is None else StructuredOutputsParams.of(self.structured_outputs)
        )

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return dict(self.logit_bias)


def check_float(name: str, value: object, low: float, high: float, *, exclusive_low: bool = False) -> None:
    """Raise RequestError unless `value` is a finite number in [low, high] (or (low, high])."""
    bounds = f"{'(' if exclusive_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number in {bounds}, got {value!r}")
    if not low <= value <= high or (exclusive_low and value == low):
        raise RequestError(f"{name} must be in {bounds}, got {value!r:.40}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise RequestError unless `value` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    if value < low or value > high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}")


def as_strings(name: str, value: object) -> tuple[str, ...]:
    """One string or several, each of at least one character. Raises RequestError."""
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ("",)
    if not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"{name} must be non-empty strings", hint=f"leave {name} out for none")
    return strings


def as_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Raises RequestError for anything but token ids."""
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}")
    ids = tuple(value)
    for token in ids:
        check_int(name, token, 0, MAX_TOKEN_ID)
    return ids


def as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """(token id, bias) by token id; an id may be written in digits, as in JSON. Raises RequestError."""
    try:
        pairs = dict(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r:.80}") from None
    biases: dict[int, float] = {}
    for key, bias in pairs.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        check_int("logit_bias token ids", token, 0, MAX_TOKEN_ID)
        if bias != -math.inf:
            check_float(f"logit_bias of token {token}", bias, -100.0, 100.0)
        biases[token] = float(bias)
    return tuple(sorted(biases.items()))
