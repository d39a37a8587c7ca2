"""Chooser: the target's choice is a function of logits, parameters and noise row, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specinfer.sampling import Chooser, NoiseCache, Row, gumbel, make_processors, process
from specinfer.sampling import chooser as chooser_module
from specinfer.sampling_params import SamplingParams


def row(position=10, seed=1, sample_index=0, ends=(), **params):
    sampling = SamplingParams(**params)
    processors = make_processors(
        sampling, num_prompt_tokens=10, end_token_ids=ends, bad_words=(), vocab_size=100_000
    )
    history = (0,) * position if processors else ()
    return Row(sampling, seed, sample_index, position, 10, tuple(ends), history, (), processors)


def chooser(num_tokens, **options):
    return Chooser(NoiseCache(num_tokens, **options))


rows_of_any_kind = st.lists(
    st.builds(
        row,
        position=st.integers(10, 13),
        seed=st.sampled_from([0, 2**64 - 1]),
        sample_index=st.integers(0, 1),
        ends=st.sampled_from([(), (0, 1)]),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        top_k=st.sampled_from([0, 4]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_tokens=st.sampled_from([0, 2]),
    ),
    min_size=1,
    max_size=6,
)


@given(rows_of_any_kind, st.integers(0, 50), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_do_not_see_each_other(rows, seed, dtype):
    logits = torch.randn(len(rows), 37, generator=torch.Generator().manual_seed(seed)).to(dtype)
    before = logits.clone()
    shared = chooser(37, max_rows=3)
    together = shared.perturbed(logits, rows)
    chosen = shared.choose(logits, rows)
    assert torch.equal(logits, before), "the caller's logits were written to"
    assert chosen.dtype == np.int64
    for i, r in enumerate(rows):
        expected = process(logits[i : i + 1], [r])
        if r.params.temperature > 0:
            expected = expected + gumbel([r.noise_key], 37)
        assert torch.equal(together[i : i + 1], expected)
        assert chosen[i] == int(np.argmax(expected.numpy()))
        assert chooser(37).choose(logits[i : i + 1], [r]).tolist() == [chosen[i]]
        assert chooser(37).choose_one(logits[i].float().numpy(), r) == chosen[i]
        laws = [chooser(37).law_of_one(logits[i].float().numpy(), r), shared.probabilities(logits, rows)[i]]
        assert np.array_equal(*laws)


@pytest.mark.skipif(chooser_module.native is None, reason="specinfer._cpu was not built")
@given(
    rows_of_any_kind,
    st.integers(0, 2**32 - 1),
    st.sampled_from([5, 37, 128, 129, 3000, 49152]),
    st.sampled_from(["spread", "flat", "tied", "banned", "peaked"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_extension_chooses_as_the_reference_does(rows, seed, vocab, kind, dtype):
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "flat":
            logits *= 1e-3
        case "tied":
            logits = logits.round()
        case "banned":
            logits[logits < 1.0] = -torch.inf
            logits[:, 2] = 0.0  # the others may be end tokens
        case "peaked":
            logits[:, seed % vocab] += 20.0
    logits = (5 * logits).to(dtype)
    chosen = chooser(vocab).choose(logits, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser_module, "native", None)
        assert chosen.tolist() == chooser(vocab).choose(logits, rows).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_lowest_id_wins_a_tie(dtype, temperature):
    generator = torch.Generator().manual_seed(0)
    for num_rows, vocab in ((1, 49152), (3, 9001), (5, 8)):
        logits = torch.randn(num_rows, vocab, generator=generator).clamp(max=1.0).to(dtype)
        for tied in ((vocab - 1, vocab // 2, 5), (vocab - 1, vocab - 2), (vocab // 2 + 1, 0)):
            x = logits.clone()
            x[:, list(tied)] = 100.0
            filtered = [row(temperature=temperature, top_k=1)] * num_rows
            assert chooser(vocab).choose(x, filtered).tolist() == [min(tied)] * num_rows


def test_greedy_is_argmax_and_needs_no_noise():
    greedy = chooser(1)  # noise for one token would not do
    logits = torch.randn(4, 100)
    rows = [row(temperature=0.0, top_k=3)] * 4
    assert greedy.choose(logits, rows).tolist() == logits.argmax(1).tolist()
    assert greedy.perturbed(logits, rows) is logits


def test_end_tokens_are_banned_in_a_greedy_batch_too():
    rows = [row(temperature=0.0, ends=[1], min_tokens=1), row(temperature=0.0, ends=[1])]
    logits = torch.tensor([[0.0, 9.0, 1.0]] * 2).bfloat16()
    assert chooser(3).choose(logits, rows).tolist() == [2, 1]


def test_a_draft_with_a_subset_of_the_vocabulary_sees_the_targets_noise():
    ids = torch.tensor([5, 90, 17, 0])
    logits = torch.randn(2, 4)
    rows = [row(), row(temperature=0.0)]
    out = chooser(100).perturbed(logits, rows, ids)
    assert torch.equal(out[0], logits[0] + gumbel([rows[0].noise_key], 100)[0, ids])
    assert torch.equal(out[1], logits[1])


def test_a_narrower_draft_takes_the_first_columns_and_a_wider_one_is_refused():
    logits = torch.zeros(1, 4)
    out = chooser(9).perturbed(logits, [row()])
    assert torch.equal(out, gumbel([row().noise_key], 4))
    with pytest.raises(ValueError, match="noise for 3 tokens"):
        chooser(3).perturbed(logits, [row()])


def test_equal_logits_at_one_position_give_equal_choices_whoever_asks():
    """Draft and target, tree and chain, one step or another: a perfect draft is always right."""
    logits = torch.randn(6, 500)
    rows = [row(position=position) for position in range(10, 16)]
    target = chooser(500).choose(logits, rows)
    draft = chooser(500, max_rows=1)
    assert [int(draft.choose(logits[i : i + 1], [rows[i]])[0]) for i in (3, 0, 5, 1, 2, 4)] == [
        target[i] for i in (3, 0, 5, 1, 2, 4)
    ]


def test_choices_follow_the_processed_law():
    params = dict(temperature=0.8, top_k=4, top_p=0.95)
    logits = torch.tensor([[1.0, 0.2, -0.5, 1.3, 0.9, -2.0]])
    num_draws = 20_000
    rows = [row(position=position, **params) for position in range(num_draws)]
    expected = chooser(6).probabilities(logits, rows[:1])[0]
    counts = np.bincount(chooser(6).choose(logits.expand(num_draws, -1), rows), minlength=6)
    allowed = expected > 0
    assert allowed.sum() == 4 and counts[~allowed].sum() == 0
    assert stats.chisquare(counts[allowed], expected[allowed] * num_draws).pvalue > 1e-3


@given(rows_of_any_kind, st.integers(0, 50))
def test_probabilities_are_the_softmax_of_processed_logits(rows, seed):
    logits = torch.randn(len(rows), 37, generator=torch.Generator().manual_seed(seed))
    p = chooser(37).probabilities(logits, rows)
    assert p.dtype == np.float64 and np.allclose(p.sum(1), 1.0, rtol=0, atol=1e-14)
    for i, r in enumerate(rows):
        processed = process(logits[i : i + 1], [r])[0].double()
        if r.params.temperature > 0:
            assert np.allclose(p[i], torch.softmax(processed, 0).numpy(), rtol=1e-13, atol=0)
        else:
            assert p[i].tolist() == np.eye(37)[int(processed.argmax())].tolist()
