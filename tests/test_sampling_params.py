"""Every field has a range, and an error says which field and which range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from specinfer import RequestError, SamplingParams

MAX_INT = 2**31 - 1
ACCEPTED = [
    ("temperature", [0, 0.0, 0.5, 1, 100.0]),
    ("top_k", [-1, 0, 1, MAX_INT]),
    ("top_p", [1e-9, 0.5, 1, 1.0]),
    ("min_p", [0, 0.0, 0.5, 1.0]),
    ("typical_p", [1e-9, 0.5, 1]),
    ("repetition_penalty", [0.01, 1, 100.0]),
    ("presence_penalty", [-2, 0.5, 2.0]),
    ("frequency_penalty", [-2.0, 0, 2]),
    ("logit_bias", [{}, {5: 1}, {0: -100.0, 3: 100}, {1: -math.inf}, {"17": 2.0}, [(5, 1.0)]]),
    ("allowed_token_ids", [None, [0], (1, MAX_INT)]),
    ("bad_words", ["a", ["a", "b c"], ()]),
    ("include_stop_str_in_output", [True, False]),
    ("skip_special_tokens", [True, False]),
    ("logprobs", [None, 0, 20]),
    ("prompt_logprobs", [None, 0, 20]),
    ("seed", [None, 0, 2**64 - 1]),
    ("max_tokens", [1, MAX_INT]),
    ("min_tokens", [0, 128]),
    ("ignore_eos", [True, False]),
    ("stop", ["a", ["a", "bc"], (), []]),
    ("stop_token_ids", [[], [0], (1, MAX_INT)]),
    ("n", [1, 1024]),
]
CANONICAL = ("top_k", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
NAN, INF = float("nan"), float("inf")
REFUSED = [
    ("temperature", [-1, -1e-9, 100.1, 10**400, NAN, INF, "1", None, True], "[0, 100]"),
    ("top_k", [-2, 2**31, 1.0, "1", None, True], f"[-1, {MAX_INT}]"),
    ("top_p", [0, 0.0, -0.1, 1.1, NAN, "1", None], "(0, 1]"),
    ("min_p", [-0.1, 1.1, NAN, INF, "1", None], "[0, 1]"),
    ("typical_p", [0, 0.0, 1.1, NAN, None], "(0, 1]"),
    ("repetition_penalty", [0, -1.0, 1e-40, 100.1, NAN, INF, None, "1"], "[0.01, 100]"),
    ("presence_penalty", [-2.1, 2.1, NAN, None, True], "[-2, 2]"),
    ("frequency_penalty", [-2.1, 2.1, NAN, None, "0"], "[-2, 2]"),
    (
        "logit_bias",
        [{1: 100.1}, {1: -101}, {1: 10**400}, {1: INF}, {1: NAN}, {1: "2"}, {1: None}],
        "[-100, 100]",
    ),
    (
        "logit_bias",
        [{-1: 1.0}, {2**31: 1.0}, {"a": 1.0}, {"9" * 5000: 1.0}, {1.0: 1.0}, {None: 1.0}],
        f"[0, {MAX_INT}]",
    ),
    ("logit_bias", [5, None, "ab", [1, 2]], "map token ids to numbers"),
    ("allowed_token_ids", [[-1], [2**31], ["a"], [True]], f"[0, {MAX_INT}]"),
    ("allowed_token_ids", [5, True], "list of token ids"),
    ("allowed_token_ids", [[]], "is empty"),
    ("bad_words", ["", ["a", ""], [1], 5, None], "non-empty strings"),
    ("include_stop_str_in_output", [0, None, "no"], "True or False"),
    ("skip_special_tokens", [1, None], "True or False"),
    ("logprobs", [-1, 21, 1.0, True, "5"], "[0, 20]"),
    ("prompt_logprobs", [-1, 21, 1.0, True], "[0, 20]"),
    ("seed", [-1, 2**64, 1.0, "1", True], f"[0, {2**64 - 1}]"),
    ("max_tokens", [0, -1, 2**31, 1.5, None, False], f"[1, {MAX_INT}]"),
    ("min_tokens", [-1, 129, 1.5, None], "[0, 128]"),
    ("ignore_eos", [0, 1, "yes", None], "True or False"),
    ("stop", ["", ["a", ""], [1], 5, None, b"a"], "non-empty strings"),
    ("stop_token_ids", [[-1], [2**31], ["a"], [1.0], "ab", [True]], f"[0, {MAX_INT}]"),
    ("stop_token_ids", [5, None], "list of token ids"),
    ("n", [0, -1, 1025, 1.0, None], "[1, 1024]"),
]


@pytest.mark.parametrize(("field", "value"), [(field, v) for field, values in ACCEPTED for v in values])
def test_in_range(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    if field not in CANONICAL:
        assert getattr(params, field) == value


@pytest.mark.parametrize(
    ("field", "value", "range_"), [(field, v, range_) for field, values, range_ in REFUSED for v in values]
)
def test_out_of_range(field: str, value: Any, range_: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.message.startswith(field)
    assert range_ in error.value.message


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match=r"min_tokens must be in \[0, 5\], got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_one_canonical_form() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert params.stop_strings == ("end",)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert params.stop_token_ids == (3, 4)
    assert params == SamplingParams(stop=["end"], stop_token_ids=(3, 4))
    assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=[3, 4]))
    generator = SamplingParams(stop=(s for s in ("a", "b")))  # type: ignore[arg-type]
    assert generator.stop_strings == ("a", "b")


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_the_canonical_form_of_biases() -> None:
    params = SamplingParams(logit_bias={7: 1, "3": -2.5})  # type: ignore[dict-item]
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params.biases == {3: -2.5, 7: 1.0}
    assert hash(params) == hash(replace(params)) == hash(SamplingParams(logit_bias=[(7, 1.0), (3, -2.5)]))
    assert SamplingParams(bad_words="a b", allowed_token_ids=[4]) == SamplingParams(
        bad_words=["a b"], allowed_token_ids=(4,)
    )


def test_an_unknown_parameter_is_named_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="temprature is not known\nhint: did you mean temperature?"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
