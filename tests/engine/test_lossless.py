"""Coupled verification: whatever trees are proposed, the tokens are those of plain decoding, to the last one.

The real engine runs a tiny Llama; a drafter that proposes arbitrary trees is put into it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, Expansion, SamplingParams
from specinfer.engine.request import Request

BYTES_PER_SLOT = 256  # of the tiny model: 2 layers, K and V, 2 heads of 8, fp32


@pytest.fixture(scope="module")
def engines(tiny_model: Path):  # noqa: ANN201
    @cache
    def make(max_step_tokens: int, num_slots: int, prefix_cache: bool, dtype: str) -> LLM:
        return LLM(
            str(tiny_model),
            dtype=dtype,  # type: ignore[arg-type]
            max_num_seqs=4,
            max_step_tokens=max_step_tokens,
            kv_memory=num_slots * BYTES_PER_SLOT // (2 if dtype == "bfloat16" else 1),
            prefix_cache=prefix_cache,
        )

    return make


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    """All requests at once, slots checked after every step."""
    requests = [r for p, sp in zip(prompts, params, strict=True) for r in llm.engine.add_request(p, sp)]
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    return requests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    max_step_tokens=st.sampled_from([3, 17, 256]),
    num_slots=st.sampled_from([64, 100, 1000]),
    prefix_cache=st.booleans(),
    num_requests=st.integers(1, 6),
    n=st.sampled_from([1, 1, 2]),
    filters=st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "min_tokens": 4}]),
)
def test_arbitrary_trees_change_nothing(
    engines,  # noqa: ANN001
    arbitrary: Any,
    dtype: str,
    seed: int,
    temperature: float,
    max_step_tokens: int,
    num_slots: int,
    prefix_cache: bool,
    num_requests: int,
    n: int,
    filters: dict[str, float],
) -> None:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 256, 20).tolist()
    prompts = [
        common[: rng.integers(0, 20)] + rng.integers(0, 256, rng.integers(1, 15)).tolist()
        for _ in range(num_requests)
    ]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=int(rng.integers(4, 25)), n=n, **filters)  # type: ignore[arg-type]
        for i in range(num_requests)
    ]
    roomy = engines(256, 4000, False, dtype)
    alone = [[r.completion() for r in run(roomy, [p], [sp])] for p, sp in zip(prompts, params, strict=True)]
    answers = {(*prompt, c.index): c.token_ids for prompt, cs in zip(prompts, alone, strict=True) for c in cs}
    llm = engines(max_step_tokens, num_slots, prefix_cache, dtype)
    plain = llm.engine.parts
    try:
        llm.engine.parts = replace(
            plain, drafter=arbitrary(answers, seed), topology=Expansion(1), max_tree_nodes=16
        )
        together = run(llm, prompts, params)
    finally:
        llm.engine.parts = plain
    for request, expected in zip(together, [c for cs in alone for c in cs], strict=True):
        got = request.completion()
        assert got.token_ids == expected.token_ids
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    assert not llm.engine.parts.scheduler.running


def test_preemption_and_prefix_hits_do_happen(engines) -> None:  # noqa: ANN001
    """The cases above are empty promises unless the small pool really preempts and the cache really hits."""
    llm = engines(17, 64, True, "float32")
    before = llm.engine.parts.scheduler.num_preemptions
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, i] for i in range(6)]
    requests = run(llm, prompts, [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 6)
    assert llm.engine.parts.scheduler.num_preemptions > before
    assert any(r.num_cached_tokens >= 8 for r in requests)


def test_plain_decoding_equals_recomputation_from_scratch(tiny_model: Path) -> None:
    """Plain decoding itself, against feeding the whole sequence anew for every token."""
    llm = LLM(str(tiny_model), dtype="float32")
    prompt = list(range(40, 70))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True)
        expected = llm.generate(prompt, params)[0].outputs[0].token_ids
        tokens = list(prompt)
        for _ in range(20):
            one = replace_max_tokens(params, len(tokens) - len(prompt))
            fresh = LLM(str(tiny_model), dtype="float32", prefix_cache=False)
            request = fresh.engine.add_request(tokens, one)[0]
            request.num_prompt_tokens = len(prompt)
            fresh.engine.step()
            tokens.append(request.tokens[-1])
        assert tuple(tokens[len(prompt) :]) == expected


def replace_max_tokens(params: SamplingParams, done: int) -> SamplingParams:
    """The same params with room for one token after `done`."""
    return replace(params, max_tokens=done + 2, min_tokens=0)


@pytest.mark.parametrize(
    "drafts",
    [
        ["draft"],
        ["other"],
        ["features"],
        ["ngram"],
        ["draft", "features"],
        ["features", "other", "ngram", "draft"],
    ],
)
@pytest.mark.parametrize("tree", ["1,1,1,1", "3,2,1,1"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_drafter(
    tiny_model: Path,
    tiny_draft: Path,
    other_draft: Path,
    feature_draft: Path,
    drafts: list[str],
    tree: str,
    temperature: float,
) -> None:
    paths = {
        "draft": str(tiny_draft),
        "other": str(other_draft),
        "features": str(feature_draft),
        "ngram": "ngram",
    }
    prompts = [[int(t) for t in np.random.default_rng(i).integers(0, 256, 5 + 3 * i)] * 2 for i in range(8)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40) for i in range(8)]
    plain = LLM(str(tiny_model), dtype="float32").generate(prompts, params, progress=False)
    llm = LLM(str(tiny_model), drafts=[paths[d] for d in drafts], tree=tree, dtype="float32", max_num_seqs=3)
    speculative = llm.generate(prompts, params, progress=False)
    for a, b in zip(plain, speculative, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    accepted = sum(o.outputs[0].stats.num_accepted_tokens for o in speculative)
    if "draft" in drafts or (drafts == ["ngram"] and temperature == 0):
        assert accepted > 0
    llm.engine.check_integrity()
