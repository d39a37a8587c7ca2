"""Every field has a range, and an error says which field and which range."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer import RequestError, SamplingParams

MAX_INT = 2**31 - 1
ACCEPTED = [
    ("temperature", [0, 0.0, 0.5, 1, 100.0]),
    ("top_k", [0, 1, MAX_INT]),
    ("top_p", [1e-9, 0.5, 1, 1.0]),
    ("min_p", [0, 0.0, 0.5, 1.0]),
    ("seed", [None, 0, 2**64 - 1]),
    ("max_tokens", [1, MAX_INT]),
    ("min_tokens", [0, 128]),
    ("ignore_eos", [True, False]),
    ("stop", ["a", ["a", "bc"], (), []]),
    ("stop_token_ids", [[], [0], (1, MAX_INT)]),
    ("n", [1, 1024]),
]
NAN, INF = float("nan"), float("inf")
REFUSED = [
    ("temperature", [-1, -1e-9, 100.1, NAN, INF, "1", None, True], "[0, 100]"),
    ("top_k", [-1, 2**31, 1.0, "1", None, True], f"[0, {MAX_INT}]"),
    ("top_p", [0, 0.0, -0.1, 1.1, NAN, "1", None], "(0, 1]"),
    ("min_p", [-0.1, 1.1, NAN, INF, "1", None], "[0, 1]"),
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
    if field not in ("stop", "stop_token_ids"):
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
    assert params.stop_token_ids == (3, 4)
    assert params == SamplingParams(stop=["end"], stop_token_ids=(3, 4))
    assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=[3, 4]))
    generator = SamplingParams(stop=(s for s in ("a", "b")))  # type: ignore[arg-type]
    assert generator.stop_strings == ("a", "b")


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
