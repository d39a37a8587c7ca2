"""Filters and end tokens: against a plain reference, and independent of the other rows to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from specinfer.sampling import Row, filters, make_processors, process
from specinfer.sampling.filters import Filters
from specinfer.sampling_params import SamplingParams

INF = math.inf
NUM_TOKENS = 500


def row(position=10, ends=(), **params):
    """A row with 10 tokens of prompt."""
    sampling = SamplingParams(**params)
    return Row(
        params=sampling,
        seed=0,
        sample_index=0,
        position=position,
        num_prompt_tokens=10,
        end_token_ids=tuple(ends),
        history=(0,) * position,
        processors=make_processors(
            sampling, num_prompt_tokens=10, end_token_ids=ends, bad_words=(), vocab_size=NUM_TOKENS
        ),
    )


def one(values, token_ids=None, **params):
    ids = None if token_ids is None else torch.tensor(token_ids)
    logits = torch.tensor([values], dtype=torch.float32)
    return process(logits, [row(**params)], ids, NUM_TOKENS)[0].tolist()


def kept(values, **params):
    return [i for i, x in enumerate(one(values, **params)) if x > -INF]


@st.composite
def params(draw):
    return dict(
        temperature=draw(st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.3])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 300])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.2, 0.9])),
        min_tokens=draw(st.sampled_from([0, 3])),
        ends=draw(st.sampled_from([(), (0,), (2, 3)])),
        position=draw(st.sampled_from([10, 12, 13])),
    )


def some_logits(seed, n, vocab):
    """Coarse enough for ties at every boundary."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.round(generator.normal(size=(n, vocab)) * 3, 1).astype(np.float32))


def reference(x, row):
    """One row, in plain numpy with a full stable sort."""
    p = row.params
    x = x.astype(np.float32).copy()
    if row.position - row.num_prompt_tokens < p.min_tokens:
        x[list(row.end_token_ids)] = -INF
    if p.temperature == 0:
        return x
    x = x / np.float32(p.temperature)
    if p.min_p > 0:
        x[x < x.max() + np.float32(math.log(p.min_p))] = -INF
    order = np.argsort(-x, kind="stable")
    keep = order[: p.top_k] if p.top_k else order
    if p.top_p < 1:
        weights = np.exp(x[keep].astype(np.float64) - x.max())
        before = np.cumsum(weights) - weights
        keep = keep[before < p.top_p * weights.sum()]
    result = np.full_like(x, -INF)
    result[keep] = x[keep]
    if p.typical_p < 1:
        kept = result.astype(np.float64)
        weights = np.exp(kept - kept.max())
        probabilities = weights / weights.sum()
        logs = np.log(probabilities, out=np.full_like(kept, -INF), where=probabilities > 0)
        entropy = -(probabilities[probabilities > 0] * logs[probabilities > 0]).sum()
        surprise = np.round(abs(-logs - entropy), 9)
        order = np.argsort(surprise, kind="stable")
        last = min(int((probabilities[order].cumsum() < p.typical_p).sum()), len(order) - 1)
        result[surprise > surprise[order[last]]] = -INF
    return result


@given(st.lists(params(), min_size=1, max_size=6), st.integers(0, 100), st.sampled_from([5, 33, 400]))
def test_rows_equal_the_reference_and_do_not_see_each_other(many, seed, vocab):
    rows = [row(**p) for p in many]
    logits = some_logits(seed, len(rows), vocab)
    before = logits.clone()
    together = process(logits, rows)
    assert torch.equal(logits, before), "the caller's logits were written to"
    assert together.dtype == torch.float32
    for i, r in enumerate(rows):
        assert torch.equal(process(logits[i : i + 1], [r])[0], together[i])
        assert np.array_equal(reference(logits[i].numpy(), r), together[i].numpy())


@given(params(), st.integers(0, 100))
def test_the_likeliest_token_survives_all_but_typical_p(p, seed):
    p["typical_p"] = 1.0
    logits = some_logits(seed, 1, 50)
    allowed = logits[0].clone()
    if p["position"] - 10 < p["min_tokens"]:
        allowed[list(p["ends"])] = -INF
    assert process(logits, [row(**p)])[0, allowed.argmax()] > -INF


def test_a_large_flat_vocabulary_needs_the_whole_sort():
    logits = some_logits(0, 2, 20_001) * 0.1
    rows = [row(top_p=0.95), row(typical_p=0.95)]
    out = process(logits, rows)
    for i, r in enumerate(rows):
        assert np.array_equal(reference(logits[i].numpy(), r), out[i].numpy())


def test_nothing_to_do_costs_nothing():
    logits = torch.randn(2, 9)
    assert process(logits, [row(temperature=0.0), row(temperature=0.0, top_k=2, top_p=0.1)]) is logits
    assert process(logits, [row(), row(top_k=9)]) is logits
    assert process(logits.bfloat16(), [row()] * 2).dtype == torch.float32


def test_temperature_divides():
    assert one([1.0, -3.0], temperature=0.5) == [2.0, -6.0]
    assert one([1.0, -3.0], temperature=1e-30) == one([1.0, -3.0], temperature=1e-6)
    assert all(math.isfinite(x) for x in one([1e5, -1e5], temperature=1e-45))


def test_filters_and_their_ties():
    assert kept([1.0, 3.0, 2.0], top_k=2) == [1, 2]
    assert kept([3.0, 1.0, 3.0, 3.0], top_k=2) == [0, 2]
    assert kept([0.0] * 10, top_p=0.3) == [0, 1, 2]
    assert kept([0.0] * 10, top_p=1e-9) == [0]
    assert kept([0.0, 0.0, -1.0], min_p=1.0) == [0, 1]
    log = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert kept(log, top_p=0.75) == [0, 1]
    assert kept(log, top_p=0.85) == [0, 1, 2]
    assert kept(log, min_p=0.25) == [0, 1, 2]


def test_the_order_is_temperature_then_min_p_then_top_k_then_top_p():
    log = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert kept(log, min_p=0.35, temperature=2.0) == [0, 1, 2]  # sqrt(0.15 / 0.5) > 0.35
    assert kept(log, top_k=2, top_p=0.6) == [0]  # 0.5 / 0.8 reaches 0.6
    assert kept(log, top_p=0.6) == [0, 1]
    assert kept(log, min_p=0.5, top_p=0.6) == [0]  # min_p leaves 0.5 and 0.3


def test_typical_p_keeps_what_is_neither_likely_nor_unlikely():
    log = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]  # 1, 2, 3, 3 bits; the entropy is 1.75
    assert kept(log, typical_p=0.2) == [1]
    assert kept(log, typical_p=0.3) == [0, 1]
    assert kept(log, typical_p=0.8) == [0, 1, 2, 3]  # the last two are as good as each other
    assert kept(log, typical_p=0.2, temperature=0.0) == [0, 1, 2, 3]
    assert kept(log, typical_p=0.2, top_k=1) == [0]


@given(st.integers(0, 200), st.sampled_from([0.1, 0.5, 0.9, 0.99]), st.sampled_from([1.0, 0.7]))
def test_typical_p_as_transformers_has_it(seed, typical_p, temperature):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 200)).astype(np.float32) * 2)
    expected = TypicalLogitsWarper(typical_p)(None, logits / temperature)
    ours = process(logits, [row(typical_p=typical_p, temperature=temperature)] * 2)
    assert torch.equal(ours.isinf(), expected.isinf())


def test_end_tokens_are_banned_below_min_tokens():
    assert kept([0.0, 5.0, 1.0], ends=[1], min_tokens=2, position=11) == [0, 2]
    assert kept([0.0, 5.0, 1.0], ends=[1], min_tokens=2, position=12) == [0, 1, 2]
    assert kept([0.0, 5.0, 1.0], ends=[1, 999], min_tokens=2, temperature=0.0) == [0, 2]
    assert kept([0.0, 5.0, 1.0], ends=[1], min_tokens=2, top_k=1) == [2]


def test_a_subset_vocabulary_bans_by_the_targets_id():
    assert kept([0.0, 5.0, 1.0], token_ids=[7, 1, 300], ends=[300, 2], min_tokens=1) == [0, 1]
    assert kept([0.0, 5.0, 1.0], token_ids=[7, 1, 300], ends=[0], min_tokens=1) == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(threads):
    logits = some_logits(3, 3, 40_000)
    rows = [row(temperature=0.7, top_p=0.9), row(top_k=50, top_p=0.8), row(min_p=0.1)]
    expected = [reference(logits[i].numpy(), r) for i, r in enumerate(rows)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = process(logits, rows)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(e, o) for e, o in zip(expected, out.numpy(), strict=True))


@pytest.mark.skipif(filters.native is None, reason="specinfer._cpu was not built")
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 5, 129, 3000, 49152]),
    st.sampled_from(["spread", "flat", "equal", "tied", "banned", "far"]),
    st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0, 0, 1, 2, 40, 256, 257]),
    st.sampled_from([1.0, 1e-6, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0 - 1e-9]),
    st.sampled_from([1.0, 1.0, 0.5]),
)
def test_the_extension_keeps_the_same_tokens(seed, vocab, kind, min_p, top_k, top_p, typical_p):
    x = 3 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "flat":
            x *= 1e-3
        case "equal":
            x.zero_()  # the share is reached where the sums are equal: too close to call
        case "tied":
            x = x.round()
        case "banned":
            x[:, 1:][x[:, 1:] < 1.0] = -torch.inf
        case "far":
            x = 100 * x
    wanted = Filters(min_p, top_k if top_k < vocab else 0, top_p, typical_p)
    kept = wanted.apply(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "native", None)
        assert torch.equal(kept, wanted.apply(x))
