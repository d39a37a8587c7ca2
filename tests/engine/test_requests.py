"""What a request comes to: its end, its samples and seeds, its statistics, and what errors leave behind."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.engine.request import Request
from specinfer.outputs import CompletionOutput

PROMPT = [10, 20, 30, 40, 50]
END = 257


def run(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[CompletionOutput]:
    requests = llm.engine.add_request(prompt, params)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    return [r.completion() for r in requests]


@pytest.fixture(scope="module")
def both(tiny_llm: LLM, put: Any, oracle: Any, script: Any) -> Any:
    """both(answer, params): the scripted answer, plain and then with every draft token right; they must agree
    in everything but the statistics."""

    def run_both(answer: str | list[int], **params: Any) -> CompletionOutput:
        tokens = tiny_llm.tokenizer.encode(answer) if isinstance(answer, str) else answer
        sampling = SamplingParams(seed=0, **{"max_tokens": len(tokens), **params})
        with put(tiny_llm, chooser=script([tokens])):
            plain = run(tiny_llm, sampling)[0]
        with put(tiny_llm, chooser=script([tokens]), drafter=oracle([tokens], 4)):
            fast = run(tiny_llm, sampling)[0]
        for field in ("text", "token_ids", "finish_reason", "stop_reason", "seed"):
            assert getattr(plain, field) == getattr(fast, field), field
        if len(plain.token_ids) > 2:
            assert fast.stats.num_steps < plain.stats.num_steps
        return fast

    return run_both


def test_length(both: Any) -> None:
    done = both("abcdefgh", max_tokens=6)
    assert (done.text, done.finish_reason, done.stop_reason) == ("abcdef", "length", None)
    assert len(done.token_ids) == 6


@pytest.mark.parametrize("place", range(8))
def test_the_models_end_token(both: Any, tiny_llm: LLM, place: int) -> None:
    """Wherever it falls in an accepted chunk, it is the last token, and no text."""
    answer = tiny_llm.tokenizer.encode("abcdefghij")
    done = both([*answer[:place], END, *answer[place:]])
    assert (done.text, done.finish_reason, done.stop_reason) == ("abcdefghij"[:place], "stop", None)
    assert done.token_ids == (*answer[:place], END)


def test_ignore_eos(both: Any, tiny_llm: LLM) -> None:
    answer = tiny_llm.tokenizer.encode("abcdef")
    done = both([*answer[:3], END, *answer[3:]], ignore_eos=True)
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("abcdef", "length", 7)
    own = both([*answer[:3], END, *answer[3:]], ignore_eos=True, stop_token_ids=[END])
    assert (own.text, own.finish_reason, own.stop_reason) == ("abc", "stop", END)


@pytest.mark.parametrize("place", range(6))
def test_stop_token_ids(both: Any, tiny_llm: LLM, place: int) -> None:
    answer = tiny_llm.tokenizer.encode("abcdef")
    done = both(answer, stop_token_ids=[answer[place], 5])
    assert (done.finish_reason, done.stop_reason) == ("stop", answer[place])
    assert done.token_ids == tuple(answer[: place + 1])


def test_the_last_token_may_also_be_an_end(both: Any) -> None:
    done = both("abcdef", max_tokens=4, stop="d")
    assert (done.text, done.finish_reason, done.stop_reason) == ("abc", "stop", "d")


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("h", "T", 2),
        (["e sea", "zz"], "Th", 7),
        ("sea is", "The ", 10),
        (["is wide", "a i"], "The se", 9),
        ("Ł", "The sea is ", 13),  # two bytes, two tokens
        ("xyz", "The sea is Łow", None),
    ],
)
def test_stop_strings_in_an_accepted_chunk(
    both: Any, stop: str | list[str], text: str, num_tokens: int | None
) -> None:
    done = both("The sea is Łow", stop=stop)
    assert done.text == text
    assert len(done.token_ids) == (num_tokens or 15)
    assert done.finish_reason == ("stop" if num_tokens else "length")
    assert done.stop_reason in (*([stop] if isinstance(stop, str) else stop), None)


def test_min_tokens_bans_end_tokens(tiny_llm: LLM, put: Any, oracle: Any) -> None:
    """With half of the vocabulary as stop tokens, all of min_tokens is the other half."""
    even = list(range(0, 300, 2))
    for seed in range(4):
        params = SamplingParams(seed=seed, max_tokens=30, min_tokens=7, stop_token_ids=even)
        plain = run(tiny_llm, params)[0]
        assert all(t % 2 and t != END for t in plain.token_ids[:7])
        assert plain.finish_reason == "stop"
        assert plain.token_ids[-1] % 2 == 0 or plain.token_ids[-1] == END
        assert len(plain.token_ids) > 7
        with put(tiny_llm, drafter=oracle([plain.token_ids], 3)):
            fast = run(tiny_llm, params)[0]
        assert (fast.token_ids, fast.stop_reason) == (plain.token_ids, plain.stop_reason)
        assert fast.stats.num_steps < plain.stats.num_steps


def test_min_tokens_holds_for_stop_strings(both: Any) -> None:
    for min_tokens in (3, 4, 5):
        done = both("abcabcabc", stop="bc", min_tokens=min_tokens)
        assert (done.text, len(done.token_ids), done.stop_reason) == ("abca", 6, "bc")
    done = both("abcabcabc", stop="bc", min_tokens=2)
    assert (done.text, len(done.token_ids)) == ("a", 3)


def test_samples_differ_by_index_and_are_their_own(tiny_llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, n=4, ignore_eos=True)
    together = run(tiny_llm, params)
    assert [c.index for c in together] == [0, 1, 2, 3]
    assert len({c.token_ids for c in together}) == 4
    for index in range(4):
        requests = tiny_llm.engine.add_request(PROMPT, params)
        for other in requests:
            if other.sample_index != index:
                tiny_llm.engine.abort(other)
        while tiny_llm.engine.has_work:
            tiny_llm.engine.step()
        assert requests[index].completion().token_ids == together[index].token_ids
    assert run(tiny_llm, SamplingParams(seed=3, max_tokens=12, ignore_eos=True))[0].token_ids == (
        together[0].token_ids
    )


def test_seeds(tiny_llm: LLM) -> None:
    outputs = [run(tiny_llm, SamplingParams(seed=seed, max_tokens=10))[0] for seed in (1, 1, 2)]
    assert outputs[0].token_ids == outputs[1].token_ids != outputs[2].token_ids
    fresh = [run(tiny_llm, SamplingParams(max_tokens=10))[0] for _ in range(2)]
    assert fresh[0].seed != fresh[1].seed
    again = run(tiny_llm, SamplingParams(seed=fresh[0].seed, max_tokens=10))[0]
    assert again.token_ids == fresh[0].token_ids
    greedy = {
        run(tiny_llm, SamplingParams(temperature=0, seed=s, max_tokens=10))[0].token_ids for s in range(3)
    }
    assert len(greedy) == 1


def test_statistics_counted_by_hand(tiny_llm: LLM, put: Any, oracle: Any, script: Any) -> None:
    """Output index 5 is proposed wrong. The first step is the prefill and has no tree:
    0 | 1 2 3 -> 4 | (5 6 7) -> 5 | 6 7 8 -> 9, and there max_tokens ends it."""
    answer = tiny_llm.tokenizer.encode("abcdefghij")
    with put(tiny_llm, chooser=script([answer]), drafter=oracle([answer], 3, wrong_at={5})):
        request = tiny_llm.engine.add_request(PROMPT, SamplingParams(max_tokens=10))[0]
        emissions = []
        while tiny_llm.engine.has_work:
            emissions += tiny_llm.engine.step()
    assert [e.token_ids for e in emissions] == [
        tuple(answer[a:b]) for a, b in [(0, 1), (1, 5), (5, 6), (6, 10)]
    ]
    assert [e.num_accepted for e in emissions] == [0, 3, 0, 3]
    done = request.completion()
    stats = done.stats
    assert done.text == "abcdefghij"
    assert stats.num_steps == 4
    assert stats.num_output_tokens == 10
    assert stats.num_draft_tokens == 9
    assert stats.num_accepted_tokens == 6
    assert stats.accepted_per_depth == (2, 2, 2)
    assert stats.drafted_per_depth == (3, 3, 3)
    assert stats.acceptance_per_depth == (2 / 3, 2 / 3, 2 / 3)
    assert stats.mean_accepted_tokens == 6 / 4
    assert stats.acceptance_length == 10 / 4
    assert request.is_accepted == [False, True, True, True, False, False, True, True, True, False]
    assert stats.ttft is not None and stats.tpot is not None
    assert 0 <= stats.tpot <= stats.ttft + 10


def test_statistics_of_plain_decoding(tiny_llm: LLM) -> None:
    done = run(tiny_llm, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
    stats = done.stats
    assert (stats.num_steps, stats.num_output_tokens, stats.acceptance_length) == (5, 5, 1.0)
    assert (stats.num_draft_tokens, stats.accepted_per_depth, stats.acceptance_per_depth) == (0, (), ())
    one = run(tiny_llm, SamplingParams(temperature=0, max_tokens=1))[0]
    assert one.stats.tpot is None
    assert one.stats.ttft is not None


def test_an_accepted_chunk_cut_short_counts_what_was_taken(
    tiny_llm: LLM, put: Any, oracle: Any, script: Any
) -> None:
    answer = tiny_llm.tokenizer.encode("abcdefghij")
    with put(tiny_llm, chooser=script([answer]), drafter=oracle([answer], 6)):
        done = run(tiny_llm, SamplingParams(max_tokens=20, stop="d"))[0]
    assert done.text == "abc"
    assert len(done.token_ids) == 4
    assert done.stats.num_accepted_tokens == 3
    assert done.stats.accepted_per_depth == (1, 1, 1, 0, 0, 0)


def test_abort_frees_slots(tiny_llm: LLM, put: Any, oracle: Any, script: Any) -> None:
    answer = tiny_llm.tokenizer.encode("abcdefghij" * 4)
    free = tiny_llm.engine.allocator.num_free
    with put(tiny_llm, chooser=script([answer]), drafter=oracle([answer], 3)):
        requests = [tiny_llm.engine.add_request(PROMPT, SamplingParams(max_tokens=40))[0] for _ in range(10)]
        for _ in range(3):
            tiny_llm.engine.step()
        assert tiny_llm.engine.allocator.num_free < free
        for request in requests[::-1]:  # running and waiting ones
            tiny_llm.engine.abort(request)
            tiny_llm.engine.check_integrity()
    assert tiny_llm.engine.allocator.num_free == free
    assert not tiny_llm.engine.has_work
    assert {r.finish_reason for r in requests} == {"abort"}
    assert requests[0].completion().token_ids == tuple(answer[:9])
    tiny_llm.engine.abort(requests[0])  # again: nothing happens
    assert requests[-1].completion().token_ids == ()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["drafter", "runner", "chooser", "commit"])
def test_an_error_in_the_middle_of_a_step(
    tiny_llm: LLM,
    put: Any,
    oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
) -> None:
    """It comes out, no slot stays reserved; the requests can be aborted or go on as if nothing had been."""
    engine = tiny_llm.engine
    params = SamplingParams(seed=0, max_tokens=20, n=3, ignore_eos=True)
    expected = [c.token_ids for c in run(tiny_llm, params)]
    free = engine.allocator.num_free
    drafter = oracle(expected, 3)

    def start() -> list[Request]:
        requests = engine.add_request(PROMPT, params)
        for _ in range(2):
            engine.step()
        return requests

    def fail_once(target: Any, name: str) -> None:
        real = getattr(target, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            raise error

        monkeypatch.setattr(target, name, failing)
        assert getattr(target, name) is not real

    def break_step() -> None:
        if where == "drafter":
            drafter.fail = error
        elif where == "runner":
            fail_once(engine.parts.runner, "run")
        elif where == "chooser":
            fail_once(engine.parts.chooser, "choose")
        else:
            fail_once(Request, "observe")  # after tokens were taken
        with pytest.raises(type(error)):
            engine.step()
        engine.check_integrity()
        assert all(len(r.table.reserved) == 0 for r in engine.parts.scheduler.running if r.table)

    with put(tiny_llm, drafter=drafter):
        aborted = start()
        break_step()
        for request in aborted:
            engine.abort(request)
        assert engine.allocator.num_free == free
        engine.check_integrity()

        going_on = start()
        break_step()
        while engine.has_work:
            engine.step()
            engine.check_integrity()
    assert [r.completion().token_ids for r in going_on] == expected
    assert engine.allocator.num_free == free


def test_samples_of_one_prompt_compute_it_once(tiny_model: Any) -> None:
    llm = LLM(str(tiny_model), dtype="float32", max_step_tokens=16)
    prompt = list(range(60))
    params = SamplingParams(n=4, seed=1, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompt, params)[0].outputs
    assert [o.stats.num_cached_tokens for o in outputs] == [0, 59, 59, 59]
