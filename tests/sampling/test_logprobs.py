"""Log probabilities: log_softmax, ranks without doubt, and no row that sees another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specinfer.sampling import token_logprobs


@given(st.integers(0, 500), st.integers(1, 5), st.integers(0, 20), st.sampled_from([3, 21, 400]))
def test_they_are_log_softmax(seed: int, num_rows: int, k: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(rng.normal(size=(num_rows, vocab)) * 4, 1).astype(np.float32))
    tokens = rng.integers(0, vocab, num_rows).tolist()
    expected = torch.log_softmax(logits.double(), 1)
    found = token_logprobs(logits, tokens, k)
    for i, (token, one) in enumerate(zip(tokens, found, strict=True)):
        order = np.argsort(-logits[i].numpy(), kind="stable").tolist()  # the lower id first among equals
        assert list(one) == list(dict.fromkeys([token, *order[:k]]))
        for t, (logprob, rank) in one.items():
            assert logprob == pytest.approx(float(expected[i, t]), abs=1e-6)
            assert order[rank - 1] == t
        assert token_logprobs(logits[i : i + 1], [token], k) == [one]


def test_halves_and_extremes() -> None:
    logits = torch.tensor([[300.0, -300.0, 300.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = token_logprobs(logits.to(dtype), [1], 1)[0]
        assert found[0].logprob == pytest.approx(-np.log(2))
        assert found[1].logprob == pytest.approx(-600, abs=1) and found[1].rank == 3
