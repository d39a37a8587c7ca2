"""Priorities, objectives and plain decoding beside others: order changes, tokens don't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, RequestError, SamplingParams
from specinfer.engine import scheduler as scheduling
from specinfer.engine.request import Request, Status
from specinfer.service import Service

BYTES_PER_SLOT = 256  # of the tiny model in fp32


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> Any:
    """make(slots, **limits): an engine on the tiny model."""

    def build(slots: int, **limits: Any) -> LLM:
        return LLM(str(tiny_model), dtype="float32", kv_memory=slots * BYTES_PER_SLOT, **limits)

    return build


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[now], which the scheduler and arrivals read."""
    now = [0.0]
    for module in (scheduling, __import__("specinfer.engine.request", fromlist=["time"])):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()  # type: ignore[no-any-return]


def add(llm: LLM, seed: int, num_tokens: int = 3, **service: Any) -> Request:
    params = SamplingParams(seed=seed, max_tokens=num_tokens, ignore_eos=True)
    return llm.engine.add_request(prompt(5, seed), params, Service(**service))[0]


def finishing_order(llm: LLM, requests: list[Request]) -> list[int]:
    order: list[int] = []
    while llm.engine.has_work:
        llm.engine.step()
        order += [i for i, r in enumerate(requests) if r.status is Status.FINISHED and i not in order]
    return order


def test_priority_goes_first(make: Any) -> None:
    llm = make(500, max_num_seqs=1)
    requests = [add(llm, i, priority=p) for i, p in enumerate([0, 1, -1, 0])]
    assert finishing_order(llm, requests) == [2, 0, 3, 1]


def test_the_least_slack_goes_first_and_who_waits_gains(make: Any, clock: list[float]) -> None:
    llm = make(500, max_num_seqs=1)
    patient = add(llm, 0)
    requests = [patient]
    for second in range(1, 13):  # one after the other, each in a hurry
        clock[0] = float(second)
        requests.append(add(llm, second, ttft=1.5))
    order = finishing_order(llm, requests)
    assert order.index(0) == 8, "due after 10 s, before whoever is due later"
    assert [i for i in order if i] == list(range(1, 13))


def test_prefill_yields_while_decoding_is_late(make: Any, clock: list[float]) -> None:
    llm = make(500, max_step_tokens=64, prefix_cache=False)
    decoding = add(llm, 0, num_tokens=20, tpot=0.1)
    llm.engine.step()
    assert decoding.num_output_tokens == 1
    llm.engine.add_request(prompt(200, 1), SamplingParams(max_tokens=1))
    late = llm.engine.parts.scheduler.running
    llm.engine.step()
    assert late[1].table is not None and late[1].table.num_committed == 64
    clock[0] = 5.0
    llm.engine.step()
    assert late[1].table.num_committed == 64 + 64 // scheduling.LATE_SHARE
    clock[0] = 100.0  # now the prompt is late, too, and more so
    decoding.first_token_time = 99.0
    llm.engine.step()
    assert late[1].table.num_committed == 64 + 64 // scheduling.LATE_SHARE + 64


def test_the_least_urgent_is_preempted(make: Any) -> None:
    llm = make(40, max_num_seqs=3, prefix_cache=False)
    urgent = [add(llm, i, num_tokens=22, priority=p) for i, p in enumerate([1, 0, 0])]
    while llm.engine.parts.scheduler.num_preemptions == 0:
        llm.engine.step()
    assert llm.engine.parts.scheduler.waiting == [urgent[0]]
    assert finishing_order(llm, urgent) == [1, 2, 0]


def test_a_request_without_speculation_beside_others(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), drafts=[str(tiny_model)], tree="1,1", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    on, off = (
        llm.engine.add_request(prompt(8), params, Service(speculation=speculation))[0]
        for speculation in (True, False)
    )
    while llm.engine.has_work:
        llm.engine.step()
    assert on.completion().token_ids == off.completion().token_ids
    assert on.completion().stats.num_steps < 20
    assert off.completion().stats.num_steps == 30 and off.completion().stats.num_draft_tokens == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": 1.5},
        {"ttft": 0},
        {"tpot": float("inf")},
        {"tpot": float("nan")},
        {"ttft": 10**400},
        {"speculation": 1},
    ],
)
def test_bad_services(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        Service(**bad)


services = st.builds(
    Service,
    priority=st.integers(-1, 1),
    ttft=st.sampled_from([None, 1e-6, 1.0]),
    tpot=st.sampled_from([None, 1e-6, 1.0]),
)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14), services), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_every_load_comes_to_its_end(
    tiny_model: Path, loads: list[tuple[int, int, Service]], gap: int
) -> None:
    """Whatever is asked for, and whenever: no deadlock, no endless preemption, the same tokens."""
    llm = LLM(
        str(tiny_model), dtype="float32", kv_memory=45 * BYTES_PER_SLOT, max_num_seqs=3, max_step_tokens=9
    )
    requests, waiting = [], list(enumerate(loads))
    num_steps = 0
    while waiting or llm.engine.has_work:
        if waiting and num_steps % (gap + 1) == 0:
            i, (length, num_tokens, service) = waiting.pop(0)
            params = SamplingParams(seed=i, max_tokens=num_tokens, ignore_eos=True)
            requests += llm.engine.add_request(prompt(length, i), params, service)
        llm.engine.step()
        llm.engine.check_integrity()
        num_steps += 1
        assert num_steps < 2000, "the scheduler is stuck"
    assert [r.num_output_tokens for r in requests] == [num_tokens for _, num_tokens, _ in loads]
