"""Log probabilities in the engine: those of a plain forward over the whole sequence, of prompt and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer import LLM, SamplingParams
from specinfer.attention import Span
from specinfer.engine.request import Request
from specinfer.outputs import TokenLogprobs
from specinfer.runtime import Batch, WorkItem

PROMPT = np.random.default_rng(0).integers(0, 256, 40).tolist()


def full_forward(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] log_softmax after every token, by one forward of the whole."""
    n = len(tokens)
    span = Span(np.zeros(0, np.int64), np.arange(n), np.arange(-1, n - 1))
    logits, _ = llm.engine.parts.runner.run(Batch.of([WorkItem(span, np.array(tokens), np.arange(n))]))
    return torch.log_softmax(logits.double(), 1)


def check(found: TokenLogprobs, row: torch.Tensor, token: int, k: int) -> None:
    order = row.argsort(descending=True, stable=True).tolist()
    assert list(found) == list(dict.fromkeys([token, *order[:k]]))
    for t, (logprob, rank) in found.items():
        assert logprob == pytest.approx(float(row[t]), abs=1e-5)
        assert order[rank - 1] == t


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()


@pytest.mark.parametrize("drafts", [(), ("draft",)])
@pytest.mark.parametrize("k", [0, 4])
def test_of_a_plain_forward(tiny_model: Path, tiny_draft: Path, drafts: Any, k: int) -> None:
    """They are the model's own, whatever the parameters make of it."""
    names = [str(tiny_draft) for _ in drafts]
    llm = LLM(str(tiny_model), drafts=names, tree="2,1,1", dtype="float32", max_step_tokens=7)
    params = SamplingParams(
        temperature=0.7, top_k=5, repetition_penalty=1.5, seed=3, max_tokens=30, ignore_eos=True,
        logprobs=k, prompt_logprobs=k,
    )  # fmt: skip
    output = llm.generate(PROMPT, params)[0]
    [done] = output.outputs
    assert done.logprobs is not None and output.prompt_logprobs is not None
    assert len(done.logprobs) == 30 and len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    expected = full_forward(llm, [*PROMPT, *done.token_ids])
    for i, found in enumerate([*output.prompt_logprobs[1:], *done.logprobs]):
        assert found is not None
        check(found, expected[i], [*PROMPT, *done.token_ids][i + 1], k)
    plain = LLM(str(tiny_model), dtype="float32").generate(PROMPT, params)[0]
    assert (plain.outputs[0].logprobs, plain.prompt_logprobs) == (done.logprobs, output.prompt_logprobs)
    if drafts:
        assert done.stats.num_accepted_tokens > 0


def test_none_unless_asked_for(tiny_llm: LLM) -> None:
    output = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=3))[0]
    assert output.prompt_logprobs is None and output.outputs[0].logprobs is None


def test_prompt_rows_do_not_come_from_the_cache(tiny_model: Path) -> None:
    """Of several samples the first computes them; who does not ask goes on using the cache."""
    llm = LLM(str(tiny_model), dtype="float32", max_step_tokens=16)
    expected = full_forward(llm, PROMPT)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, n=3, ignore_eos=True)
    for _ in range(2):
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2))
        output = llm.generate(PROMPT, scored)[0]
        assert [o.stats.num_cached_tokens for o in output.outputs] == [0, 39, 39]
        assert output.prompt_logprobs is not None
        for i, found in enumerate(output.prompt_logprobs[1:]):
            assert found is not None
            check(found, expected[i], PROMPT[i + 1], 2)
    llm.engine.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_steps", range(5))
def test_preemption_neither_loses_nor_repeats_them(
    tiny_model: Path, prefix_cache: bool, num_steps: int
) -> None:
    """Preempted after any number of steps, in the middle of the prompt or of the output."""
    llm = LLM(str(tiny_model), dtype="float32", max_step_tokens=16, prefix_cache=prefix_cache)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    [expected] = llm.engine.add_request(PROMPT, params)
    finish(llm)
    [request] = llm.engine.add_request(PROMPT, params)
    for _ in range(num_steps):
        llm.engine.step()
    if num_steps:
        llm.engine.parts.scheduler._preempt(request)
    finish(llm)
    assert request.prompt_scores() == expected.prompt_scores()
    assert request.completion().logprobs == expected.completion().logprobs
    assert len(request.logprobs) == 5


def test_an_error_in_the_middle_of_a_step_repeats_none(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    [expected] = tiny_llm.engine.add_request(PROMPT, params)
    finish(tiny_llm)
    [request] = tiny_llm.engine.add_request(PROMPT, params)

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("broken")

    monkeypatch.setattr(Request, "accept", fail)  # after the prompt's rows were filed
    with pytest.raises(RuntimeError):
        tiny_llm.engine.step()
    finish(tiny_llm)
    assert request.prompt_scores() == expected.prompt_scores()
    assert request.completion().logprobs == expected.completion().logprobs


def test_a_stream_has_them_with_its_tokens(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    chunks = list(tiny_llm.stream(PROMPT, params))
    assert all(c.logprobs is not None and len(c.logprobs) == len(c.token_ids) for c in chunks)
    assert chunks[-1].output is not None
    streamed = tuple(one for c in chunks for one in c.logprobs or ())
    assert streamed == chunks[-1].output.logprobs
    assert all(c.logprobs is None for c in tiny_llm.stream(PROMPT, SamplingParams(max_tokens=2)))
