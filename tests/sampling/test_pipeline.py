"""Processors: each against a naive reference; a token counts the same in the history and in the path."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specinfer.sampling import Row, make_processors, process
from specinfer.sampling_params import SamplingParams

INF = math.inf
VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=5)

drawn = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=30),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 0.0, 3.0, -INF]), max_size=6),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 100.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.3]),
        "presence_penalty": st.sampled_from([-0.7, 0.0, 2.0]),
        "min_tokens": st.integers(0, 6),
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    },
)


def make(params: SamplingParams, num_prompt: int, words: Sequence[Sequence[int]], ends: Sequence[int]) -> Any:
    return make_processors(
        params, num_prompt_tokens=num_prompt, end_token_ids=ends, bad_words=words, vocab_size=VOCAB
    )


def row(
    params: SamplingParams, tokens: Sequence[int], path_len: int, num_prompt: int, processors: Any
) -> Row:
    """The row after `tokens`, the last path_len of which are a tree's."""
    history, path = list(tokens[: len(tokens) - path_len]), tuple(tokens[len(tokens) - path_len :])
    return Row(params, 0, 0, len(tokens), num_prompt, (), history, path, processors)


def some_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(num_rows, VOCAB)).astype(np.float32) * 3)


def naive(
    x: torch.Tensor,
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    words: Sequence[Sequence[int]],
    ends: Sequence[int],
) -> torch.Tensor:
    """One row, token by token, in the documented order."""
    out = x.clone()
    output = list(tokens[num_prompt:])
    counts = Counter(output)
    for token in range(VOCAB):
        value = x[token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = torch.tensor(-INF)
        for *start, last in words:
            if last == token and output[len(output) - len(start) :] == start:
                value = torch.tensor(-INF)
        if token in ends and len(output) < params.min_tokens:
            value = torch.tensor(-INF)
        value = value + params.biases.get(token, 0.0)
        if token in tokens:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
            value = value - torch.tensor(float(counts[token])) * params.frequency_penalty
            value = value - (counts[token] > 0) * params.presence_penalty
        out[token] = value
    return out / params.temperature if params.temperature else out


@given(
    drawn,
    st.lists(st.integers(0, 8), min_size=1, max_size=20),
    WORDS,
    st.lists(TOKENS, max_size=2),
    st.integers(0, 99),
    st.data(),
)
def test_against_the_naive_way(
    fields: dict[str, Any],
    tokens: list[int],
    words: list[tuple[int, ...]],
    ends: list[int],
    seed: int,
    data: st.DataObject,
) -> None:
    """Also: however the tokens are divided between history and path, to the bit."""
    params = SamplingParams(**fields)
    num_prompt = data.draw(st.integers(1, len(tokens)))
    path_len = data.draw(st.integers(0, len(tokens) - num_prompt))
    logits = some_logits(seed)
    before = logits.clone()
    processors = make(params, num_prompt, words, ends)
    out = process(logits, [row(params, tokens, path_len, num_prompt, processors)])
    assert torch.equal(logits, before), "the caller's logits were written to"
    expected = naive(logits[0], params, tokens, num_prompt, words, ends)
    assert torch.equal(out[0].isinf(), expected.isinf())
    assert torch.allclose(out[0], expected, rtol=1e-6, atol=1e-6)
    fresh = make(params, num_prompt, words, ends)
    assert torch.equal(process(logits, [row(params, tokens, 0, num_prompt, fresh)]), out)


@settings(max_examples=40)
@given(drawn, st.lists(st.integers(0, 12), min_size=60, max_size=90), WORDS, st.integers(0, 99), st.data())
def test_processors_keep_up_with_a_history_that_grows(
    fields: dict[str, Any],
    tokens: list[int],
    words: list[tuple[int, ...]],
    seed: int,
    data: st.DataObject,
) -> None:
    """One set of processors for a whole request, trees of paths that come to nothing in between."""
    params = SamplingParams(**fields)
    num_prompt = 10
    processors = make(params, num_prompt, words, [3])
    length = num_prompt
    while length < len(tokens):
        path = tuple(data.draw(st.lists(TOKENS, max_size=4)))
        rows = [
            Row(params, 0, 0, length + len(p), num_prompt, (), tokens[:length], p, processors)
            for p in ((), path)
        ]
        logits = some_logits(seed + length, 2)
        out = process(logits, rows)
        for i, each in enumerate(rows):
            all_tokens = [*each.history, *each.path]
            fresh = row(params, all_tokens, 0, num_prompt, make(params, num_prompt, words, [3]))
            assert torch.equal(process(logits[i : i + 1], [fresh])[0], out[i])
        length += data.draw(st.integers(1, 30))


@given(drawn, st.lists(TOKENS, min_size=1, max_size=20), WORDS, st.integers(0, 99))
def test_a_draft_with_a_subset_of_the_vocabulary_is_edited_by_the_targets_ids(
    fields: dict[str, Any], tokens: list[int], words: list[tuple[int, ...]], seed: int
) -> None:
    params = SamplingParams(**{**fields, "temperature": 0.0})
    token_ids = torch.from_numpy(np.random.default_rng(seed).permutation(VOCAB)[:25])
    one = row(params, tokens, 0, 1, make(params, 1, words, [3, 7]))
    logits = some_logits(seed)
    expected = process(logits, [one])[:, token_ids]
    if expected.isneginf().all():  # nothing of it is allowed
        expected = logits[:, token_ids]
    assert torch.equal(process(logits[:, token_ids], [one], token_ids, VOCAB), expected)


@given(st.lists(TOKENS, min_size=1, max_size=20), st.integers(0, 99))
def test_as_transformers_has_them(tokens: list[int], seed: int) -> None:
    """Repetition penalty, biases, bad words and min_tokens; the other penalties it does not have."""
    logits, ids = some_logits(seed), torch.tensor([tokens])

    def ours(num_prompt: int = 0, words: Any = (), ends: Any = (), **fields: Any) -> torch.Tensor:
        params = SamplingParams(temperature=0, **fields)
        return process(logits, [row(params, tokens, 0, num_prompt, make(params, num_prompt, words, ends))])

    repetition = RepetitionPenaltyLogitsProcessor(1.7)
    assert torch.allclose(ours(repetition_penalty=1.7), repetition(ids, logits.clone()))
    biases = {2: -3.5, 30: 1.25}
    biased = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    assert torch.allclose(ours(logit_bias=biases), biased(ids, logits.clone()))
    words = [[5], [3, 4], [*tokens[-2:], 9]]
    assert torch.equal(ours(words=words), NoBadWordsLogitsProcessor(words)(ids, logits.clone()))
    num_prompt = len(tokens) // 2
    for min_tokens in (1, 5, 12):
        least = MinNewTokensLengthLogitsProcessor(num_prompt, min_tokens, [1, 8])
        assert torch.equal(ours(num_prompt, ends=[1, 8], min_tokens=min_tokens), least(ids, logits.clone()))


def test_parameters_that_edit_nothing_make_no_processor() -> None:
    same = SamplingParams(top_k=5, top_p=0.5, min_p=0.1, typical_p=0.9, ignore_eos=True, stop="a", logprobs=3)
    assert make(same, 5, (), [1]) == ()
    assert make(SamplingParams(min_tokens=3), 5, (), [VOCAB + 3]) == ()


def test_the_order_of_processors() -> None:
    """A ban is final, a bias is under the repetition penalty, and all is before temperature and filters."""
    params = SamplingParams(logit_bias={1: 2.0}, repetition_penalty=2.0, temperature=0.5, top_k=2)
    one = row(params, [1, 0], 0, 2, make(params, 2, [(2,)], ()))
    out = process(torch.tensor([[1.0, 1.0, 9.0, 0.9] + [-5.0] * 36]), [one])[0]
    assert out[:4].tolist() == pytest.approx([-INF, 2 * (1.0 + 2.0) / 2.0, -INF, 2 * 0.9])
