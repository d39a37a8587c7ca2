"""Every parameter under every kind of tree: tokens, text, log probabilities and ends are plain decoding's.

Most requests may only use a few letters, so that tokens repeat and words and stop strings really occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specinfer import LLM, Expansion, SamplingParams
from specinfer.engine.request import Request
from specinfer.outputs import CompletionOutput
from specinfer.sampling.penalties import Penalties
from specinfer.sampling.token_rules import BadWords, MinTokens
from specinfer.verify.verifier import VERIFIER_NAMES

KINDS = ["chain", "expansion", "merged", "ngram", "another tokenizer", "injected", "forced"]
TREES = {
    "chain": "1,1,1,1",
    "perfect": "1,1,1,1",
    "expansion": "3,2,1,1",
    "merged": "2,2,1",
    "ngram": "2,1,1,1",
    "another tokenizer": "2,1,1",
}
# Bytes. 80 slots of the tiny model make eight requests preempt each other; all slots are checked every step.
SMALL_KV, LARGE_KV = 80 * 256, 1600 * 256
LETTERS = "abcdefgh"
WORDS = st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=1, max_size=4)

PARAMETERS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.7, 1.0]), "max_tokens": st.integers(1, 24)},
    optional={
        "top_k": st.sampled_from([1, 3, 40]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "typical_p": st.sampled_from([0.2, 0.9]),
        "repetition_penalty": st.sampled_from([0.7, 1.2, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.8]),
        "logit_bias": st.dictionaries(
            st.sampled_from([ord(c) - ord("!") for c in LETTERS] + [257]),
            st.sampled_from([-100.0, -1.5, 2.0, -np.inf]),
            max_size=5,
        ),
        "allowed_token_ids": st.just([*(ord(c) - ord("!") for c in LETTERS), 200, 257]),
        "bad_words": WORDS,
        "min_tokens": st.integers(0, 8),
        "ignore_eos": st.booleans(),
        "stop": WORDS,
        "stop_token_ids": st.just([ord("c") - ord("!")]),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 3),
        "n": st.just(2),
        "structured_outputs": st.sampled_from(
            [
                {"regex": "((ab|ba)c?|cc+|[d-h]{2}|hgfe)*"},
                {"choice": ["abcabc", "abd", "bc", "gggggggg"]},
                {"grammar": 'root ::= "a" root "b" | "c" root "dd" | "hhh"'},
                {
                    "json": {"enum": [["ab", "cd"], {"a": "bad", "b": "dab"}, "c"]},
                    "disable_any_whitespace": True,
                },
            ]
        ),
    },
)

Run = Callable[[str, list[list[int]], list[SamplingParams]], list[Request]]


@pytest.fixture(scope="module")
def engine(
    tiny_model: Path, tiny_draft: Path, other_draft: Path, respelled_draft: Path
) -> Callable[[str], LLM]:
    """engine(kind), one for each kind of tree, and "plain"."""
    drafts = {
        "perfect": [str(tiny_model)],
        "merged": [str(tiny_draft), str(other_draft)],
        "ngram": ["ngram"],
        "another tokenizer": [str(respelled_draft)],
    }

    @cache
    def make(kind: str) -> LLM:
        names = [] if kind in ("plain", "injected", "forced") else drafts.get(kind, [str(tiny_draft)])
        llm = LLM(
            str(tiny_model),
            drafts=names,
            tree=TREES.get(kind, "1,1,1,1"),
            dtype="float32",
            kv_memory=SMALL_KV if kind == "injected" else LARGE_KV,
            max_step_tokens=17,
        )
        if kind == "plain":
            llm.engine.parts = replace(llm.engine.parts, max_forced_tokens=0)
        return llm

    return make


@pytest.fixture(scope="module")
def run(engine: Callable[[str], LLM], arbitrary: Any, put: Any) -> Run:
    """run(kind, prompts, params): the finished requests of one batch, or of each alone for "plain"."""

    def all_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
        requests = [r for p, sp in zip(prompts, params, strict=True) for r in llm.engine.add_request(p, sp)]
        while llm.engine.has_work:
            llm.engine.step()
            llm.engine.check_integrity()
        return requests

    def run_kind(kind: str, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
        llm = engine(kind)
        if kind == "plain":
            return [r for p, sp in zip(prompts, params, strict=True) for r in all_of(llm, [p], [sp])]
        if kind != "injected":
            return all_of(llm, prompts, params)
        answers = {
            (*r.tokens[: r.num_prompt_tokens], r.sample_index): tuple(r.output_token_ids)
            for r in run_kind("plain", prompts, params)
        }
        with put(llm, drafter=arbitrary(answers, 0), topology=Expansion(1), max_tree_nodes=16):
            return all_of(llm, prompts, params)

    return run_kind


def make_prompts(seed: int, num_prompts: int) -> list[list[int]]:
    """Letters, all with the same beginning: after a few of them, prefixes hit."""
    rng = np.random.default_rng(seed)
    common = [64, 67, 71, 65, 65, 70, 66, 69, 68, 64, 64, 70]
    return [common + rng.integers(64, 72, rng.integers(1, 12)).tolist() for _ in range(num_prompts)]


def results(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    """All that a caller sees, but for the statistics."""
    return [result(r.completion()) + (r.prompt_scores(),) for r in requests]


def result(done: CompletionOutput) -> tuple[Any, ...]:
    return (done.text, done.token_ids, done.finish_reason, done.stop_reason, done.seed, done.logprobs)


def as_params(drawn: dict[str, Any], seed: int) -> SamplingParams:
    least = min(drawn.get("min_tokens", 0), drawn["max_tokens"])
    if "structured_outputs" in drawn:
        drawn = {**drawn, "ignore_eos": False}
    return SamplingParams(**{**drawn, "min_tokens": least}, seed=seed)


@pytest.fixture(scope="module")
def known() -> dict[Any, list[tuple[Any, ...]]]:
    """Plain decoding's results by parameters and seed; unless examples vary, all kinds meet the same."""
    return {}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(drawn=st.lists(PARAMETERS, min_size=1, max_size=8), is_batch=st.booleans(), seed=st.integers(0, 1000))
def test_the_same_as_plain_decoding(
    run: Run, known: dict[Any, Any], kind: str, drawn: list[dict[str, Any]], is_batch: bool, seed: int
) -> None:
    """A batch mixes different parameters; a batch of one has the first of them."""
    drawn = (drawn * 8)[:8] if is_batch else drawn[:1]
    params = [as_params(one, seed + i) for i, one in enumerate(drawn)]
    prompts = make_prompts(seed, len(params))
    key = (tuple(params), seed)
    if key not in known:
        known[key] = results(run("plain", prompts, params))
    assert results(run(kind, prompts, params)) == known[key]


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_a_draft_without_an_allowed_token(tiny_model: Path, other_draft: Path, verifier: str) -> None:
    """Its vocabulary is a part of the target's, and none of that part may be chosen."""
    subset = set(load_file(str(other_draft / "draft_vocab.safetensors"))["d2t"].tolist())
    allowed = sorted(set(range(300)) - subset)[:5]
    llm = LLM(str(tiny_model), drafts=[str(other_draft)], tree="2,1", verifier=verifier, dtype="float32")
    for filters in ({}, {"top_p": 0.8}, {"typical_p": 0.8, "min_p": 0.1}, {"top_k": 2}, {"temperature": 0.0}):
        params = SamplingParams(allowed_token_ids=allowed, max_tokens=6, ignore_eos=True, **filters)  # type: ignore[arg-type]
        [done] = llm.generate([1, 2, 3], params)[0].outputs
        assert set(done.token_ids) <= set(allowed) and len(done.token_ids) == 6
        assert done.stats.num_accepted_tokens == 0


@settings(max_examples=12)
@given(drawn=st.lists(PARAMETERS, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_a_draft_that_is_the_target_is_always_right(run: Run, drawn: list[dict[str, Any]], seed: int) -> None:
    """It goes through the same processors with the same noise: nothing that it proposes is refused."""
    endless = [{**one, "ignore_eos": True, "stop": (), "stop_token_ids": ()} for one in drawn]
    params = [as_params(one, seed + i) for i, one in enumerate(endless)]
    for request in run("perfect", make_prompts(seed, len(params)), params):
        stats = request.completion().stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens


DEPENDENT: dict[type, dict[str, Any]] = {
    Penalties: {"frequency_penalty": 1.5, "temperature": 0.0},
    BadWords: {"bad_words": ["ab", "cd", "ee", "ba", "fg", "hh", "dc"], "temperature": 1.0},
    MinTokens: {"min_tokens": 6, "stop_token_ids": list(range(64, 71)), "temperature": 1.0},
}


@pytest.mark.parametrize("processor", DEPENDENT)
@pytest.mark.parametrize("kind", ["expansion", "injected"])
def test_a_processor_that_ignores_the_path_is_found_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, processor: type, kind: str
) -> None:
    """Every node edited by the committed tokens alone: plain decoding does not notice, trees do."""
    one = SamplingParams(allowed_token_ids=list(range(64, 72)), seed=1, max_tokens=24, **DEPENDENT[processor])
    prompts, params = make_prompts(0, 5), [one] * 5
    expected = results(run("plain", prompts, params))
    assert results(run(kind, prompts, params)) == expected
    right = processor.apply  # type: ignore[attr-defined]
    monkeypatch.setattr(processor, "apply", lambda self, x, history, path: right(self, x, history, ()))
    assert results(run("plain", prompts, params)) == expected
    assert results(run(kind, prompts, params)) != expected


def test_the_cases_above_are_no_empty_promises(run: Run, engine: Callable[[str], LLM]) -> None:
    """Drafts are accepted in all kinds, requests are preempted, prefixes hit; wanted rows never come from a
    cache."""
    letters = list(range(64, 72))
    one = SamplingParams(allowed_token_ids=letters, temperature=0, repetition_penalty=0.8, max_tokens=24)
    formed = SamplingParams(structured_outputs={"regex": "[a-h]{1,24}"}, temperature=0, max_tokens=24)
    params = [one, formed] * 4
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for kind in KINDS[:-1]:
        requests = run(kind, make_prompts(3, 8), params)
        for part in (requests[::2], requests[1::2]):
            assert sum(r.completion().stats.num_accepted_tokens for r in part) > 0, kind
        first, *others = run(kind, make_prompts(3, 8), [scored, *params[1:]])
        assert first.num_cached_tokens == 0 and all(r.num_cached_tokens >= 12 for r in others[:3]), kind
    assert engine("injected").engine.parts.scheduler.num_preemptions > 0
