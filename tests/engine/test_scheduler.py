"""Who runs when: chunks, limits, order, preemption; and that every load comes to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, RequestError, SamplingParams
from specinfer.engine.request import Request, Status
from specinfer.runtime import Batch

BYTES_PER_SLOT = 256  # of the tiny model in fp32


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> Any:
    """make(slots, **limits): an engine on the tiny model; the same arguments give the same one."""
    made: dict[Any, LLM] = {}

    def build(slots: int, **limits: Any) -> LLM:
        key = (slots, *sorted(limits.items()))
        if key not in made:
            made[key] = LLM(str(tiny_model), dtype="float32", kv_memory=slots * BYTES_PER_SLOT, **limits)
            assert made[key].engine.allocator.num_slots == slots
        return made[key]

    return build


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """batches(llm): a list that fills with the tokens per request of every target forward."""

    def watch(llm: LLM) -> list[list[int]]:
        seen: list[list[int]] = []
        real = llm.engine.parts.runner.run

        def run(batch: Batch, *args: Any) -> Any:
            seen.append([span.num_tokens for span in batch.spans])
            return real(batch, *args)

        monkeypatch.setattr(llm.engine.parts.runner, "run", run)
        return seen

    return watch


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()  # type: ignore[no-any-return]


def run_all(llm: LLM, most_steps: int = 10_000) -> int:
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
        steps += 1
        assert steps <= most_steps, "the scheduler is stuck"
    return steps


def test_prefill_comes_in_chunks(make: Any, batches: Any) -> None:
    llm = make(500, max_step_tokens=7, prefix_cache=False)
    seen = batches(llm)
    llm.engine.add_request(prompt(23), SamplingParams(max_tokens=3, ignore_eos=True))
    run_all(llm)
    assert seen == [[7], [7], [7], [2], [1], [1]]


def test_chunks_share_the_budget_and_decoding_goes_on(make: Any, batches: Any) -> None:
    llm = make(500, max_step_tokens=7, prefix_cache=False)
    seen = batches(llm)
    llm.engine.add_request(prompt(3), SamplingParams(max_tokens=4, ignore_eos=True))
    llm.engine.add_request(prompt(10), SamplingParams(max_tokens=2, ignore_eos=True))
    llm.engine.add_request(prompt(5), SamplingParams(max_tokens=1))
    run_all(llm)
    assert seen == [[3, 4], [1, 6, 1], [1, 1, 4], [1]]


@settings(max_examples=10)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1, 5, 16]))
def test_a_step_computes_no_more_prompt_than_it_may(make: Any, lengths: list[int], limit: int) -> None:
    llm = make(1000, max_step_tokens=limit, max_num_seqs=3, prefix_cache=False)
    monkeypatch = pytest.MonkeyPatch()
    seen: list[list[int]] = []
    real = llm.engine.parts.runner.run

    def run(batch: Batch, *args: Any) -> Any:
        seen.append([span.num_tokens for span in batch.spans])
        return real(batch, *args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.parts.runner, "run", run)
        for length in lengths:
            llm.engine.add_request(prompt(length), SamplingParams(max_tokens=3, ignore_eos=True))
        run_all(llm)
    assert all(sum(n for n in step if n > 1) <= limit for step in seen)
    assert all(len(step) <= 3 for step in seen)
    assert sum(map(sum, seen)) == sum(lengths) + 2 * len(lengths), "a token was computed twice"


def test_max_num_seqs_and_first_come_first_served(make: Any) -> None:
    llm = make(1000, max_num_seqs=2)
    requests = [
        llm.engine.add_request(prompt(4, i), SamplingParams(max_tokens=5, ignore_eos=True))[0]
        for i in range(5)
    ]
    finished: list[Request] = []
    while llm.engine.has_work:
        llm.engine.step()
        assert len(llm.engine.parts.scheduler.running) <= 2
        finished += [r for r in requests if r.status is Status.FINISHED and r not in finished]
    assert finished == requests
    firsts = [r.first_token_time or 0.0 for r in requests]
    assert firsts == sorted(firsts)


def test_the_youngest_is_preempted_and_comes_back_first(make: Any) -> None:
    llm = make(40, max_num_seqs=3, prefix_cache=False)
    scheduler = llm.engine.parts.scheduler
    before = scheduler.num_preemptions
    params = SamplingParams(seed=1, max_tokens=22, ignore_eos=True)
    requests = [llm.engine.add_request(prompt(10, i), params)[0] for i in range(4)]
    order: list[Request] = []
    while scheduler.num_preemptions == before:
        order = list(scheduler.running)
        llm.engine.step()
    assert order == requests[:3]
    assert scheduler.running == requests[:2]
    assert scheduler.waiting == [requests[2], requests[3]]
    run_all(llm)
    alone = make(1000, prefix_cache=False)
    for i, request in enumerate(requests):
        expected = alone.generate(prompt(10, i), params)[0].outputs[0]
        got = request.completion()
        assert got.token_ids == expected.token_ids
        assert got.stats.num_steps == expected.stats.num_steps == 22
        assert got.stats.num_output_tokens == 22
        assert got.stats.num_cached_tokens == 0
        assert got.stats.ttft is not None and got.stats.ttft > 0


def test_preemption_with_trees_keeps_the_statistics_sane(
    make: Any, put: Any, oracle: Any, tiny_llm: LLM
) -> None:
    llm = make(44, max_num_seqs=3)
    scheduler = llm.engine.parts.scheduler
    before = scheduler.num_preemptions
    params = SamplingParams(seed=1, max_tokens=24, ignore_eos=True, n=4)
    expected = [o.token_ids for o in tiny_llm.generate(prompt(8), params)[0].outputs]
    with put(llm, drafter=oracle(expected, 3)):
        requests = llm.engine.add_request(prompt(8), params)
        run_all(llm)
    assert scheduler.num_preemptions > before
    for request, tokens in zip(requests, expected, strict=True):
        stats = request.completion().stats
        assert request.completion().token_ids == tokens
        assert stats.num_output_tokens == 24
        assert stats.num_accepted_tokens == sum(stats.accepted_per_depth) == sum(request.is_accepted)
        assert stats.num_steps + stats.num_accepted_tokens == 24
        assert all(a <= d for a, d in zip(stats.accepted_per_depth, stats.drafted_per_depth, strict=True))
        assert sum(stats.drafted_per_depth) == stats.num_draft_tokens  # chains
        assert stats.num_cached_tokens <= 7


def test_trees_take_no_slot_that_a_trunk_needs(make: Any, put: Any, oracle: Any) -> None:
    """Speculation preempts nobody: the pool holds all requests, and trees only take what is left."""
    llm = make(60, max_num_seqs=4, prefix_cache=False)
    scheduler = llm.engine.parts.scheduler
    params = SamplingParams(seed=5, max_tokens=10, ignore_eos=True, n=4)
    plain = llm.engine.add_request(prompt(5), params)
    run_all(llm)
    answers = [r.completion().token_ids for r in plain]
    before = scheduler.num_preemptions
    drafter = oracle(answers, 8)
    with put(llm, drafter=drafter):
        requests = llm.engine.add_request(prompt(5), params)
        while llm.engine.has_work:
            free = llm.engine.allocator.num_free
            running = len(scheduler.running) or 4
            drafter.contexts.clear()
            llm.engine.step()
            llm.engine.check_integrity()
            assert sum(c.max_nodes - 1 for c in drafter.contexts) <= max(0, free - running)
    assert scheduler.num_preemptions == before
    assert [r.completion().token_ids for r in requests] == answers


def test_a_full_pool_gets_roots_alone(make: Any, put: Any, oracle: Any) -> None:
    llm = make(9, prefix_cache=False)
    params = SamplingParams(seed=5, max_tokens=4, ignore_eos=True)
    answer = run_one(llm, prompt(5), params)
    drafter = oracle([answer], 3)
    with put(llm, drafter=drafter):
        request = llm.engine.add_request(prompt(5), params)[0]
        run_all(llm)
    assert request.completion().token_ids == answer
    assert all(c.max_nodes - 1 <= 3 for c in drafter.contexts)


def run_one(llm: LLM, tokens: list[int], params: SamplingParams) -> tuple[int, ...]:
    return llm.generate(tokens, params)[0].outputs[0].token_ids


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 2)), min_size=1, max_size=8),
    st.sampled_from([31, 45, 90]),
    st.sampled_from([2, 9, 64]),
    st.booleans(),
    st.booleans(),
)
def test_every_load_comes_to_its_end(
    make: Any,
    put: Any,
    oracle: Any,
    loads: list[tuple[int, int, int]],
    slots: int,
    limit: int,
    prefix_cache: bool,
    is_speculative: bool,
) -> None:
    """No deadlock, no endless preemption; who cannot fit is refused at once."""
    llm = make(slots, max_num_seqs=4, max_step_tokens=limit, prefix_cache=prefix_cache)
    requests = []
    parts = {"drafter": oracle([[7] * 40] * 2, 3)} if is_speculative else {}
    with put(llm, **parts):
        for i, (length, max_tokens, n) in enumerate(loads):
            params = SamplingParams(seed=i, max_tokens=max_tokens, n=n, ignore_eos=True)
            if length + max_tokens > slots:
                with pytest.raises(RequestError, match="K/V memory"):
                    llm.engine.add_request(prompt(length, i), params)
            else:
                requests += llm.engine.add_request(prompt(length, i), params)
        tokens = sum(r.num_prompt_tokens + r.params.max_tokens for r in requests)
        run_all(llm, most_steps=10 + 3 * tokens)
    assert all(r.num_output_tokens == r.params.max_tokens for r in requests)


def test_refusals_give_the_numbers(make: Any) -> None:
    llm = make(30)
    with pytest.raises(RequestError, match=r"prompt has 20 tokens and max_tokens is 11.*holds 30") as error:
        llm.engine.add_request(prompt(20), SamplingParams(max_tokens=11))
    assert error.value.hint
    llm = make(1000)
    with pytest.raises(RequestError, match=r"prompt has 500 tokens and max_tokens is 13.*context of 512"):
        llm.engine.add_request(prompt(500), SamplingParams(max_tokens=13))
    with pytest.raises(RequestError, match="prompt token 300 is outside the vocabulary of 300"):
        llm.engine.add_request([1, 300], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="prompt token -1"):
        llm.engine.add_request([-1], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="empty"):
        llm.engine.add_request([], SamplingParams(max_tokens=1))
    assert not llm.engine.has_work
    exact = SamplingParams(max_tokens=12, ignore_eos=True)
    assert len(run_one(llm, prompt(500), exact)) == 12, "the whole context can be used"


def test_prefix_hits_are_counted_and_change_nothing(make: Any) -> None:
    llm = make(300)
    params = SamplingParams(seed=2, max_tokens=6, ignore_eos=True)
    first = llm.generate(prompt(20), params)[0].outputs[0]
    again = llm.generate(prompt(20), params)[0].outputs[0]
    longer = llm.generate([*prompt(20), *first.token_ids, 4], replace(params, max_tokens=2))[0].outputs[0]
    assert first.stats.num_cached_tokens == 0
    assert again.stats.num_cached_tokens == 19
    assert longer.stats.num_cached_tokens == 25  # the last token's K/V was never written
    assert again.token_ids == first.token_ids


def test_trees_share_what_is_left_evenly(make: Any, put: Any, oracle: Any) -> None:
    """A topology that would take everything leaves the other requests their share."""
    llm = make(100, max_num_seqs=4, prefix_cache=False)
    drafter = oracle([[7] * 40] * 4, 8)
    with put(llm, drafter=drafter, max_tree_nodes=1024):
        llm.engine.add_request(prompt(5), SamplingParams(seed=0, max_tokens=10, n=4, ignore_eos=True))
        llm.engine.step()
        llm.engine.step()
        assert [c.max_nodes for c in drafter.contexts] == [1 + (100 - 4 * 5 - 4) // 4] * 4
        run_all(llm)
