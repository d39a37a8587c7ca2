"""LLM: prompts in all their shapes, streams, interruptions."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specinfer import LLM, ConfigError, EngineConfig, RequestError, SamplingParams, StreamChunk
from specinfer.engine.engine import Engine

PARAMS = SamplingParams(seed=1, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tiny_draft: Path) -> LLM:
    return LLM(str(tiny_model), drafts=[str(tiny_draft), "ngram"], dtype="float32", max_num_seqs=3)


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Any:
    """No test leaves a request or a slot behind."""
    yield
    engine = llm.engine
    assert not engine.has_work
    engine.check_integrity()
    assert engine.prefix_cache is not None
    assert engine.allocator.num_free + engine.prefix_cache.num_evictable == engine.allocator.num_slots


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Engine) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(Engine, "step", step)


def stream(llm: LLM, prompt: Any, params: SamplingParams) -> Generator[StreamChunk]:
    return cast("Generator[StreamChunk]", llm.stream(prompt, params))


def test_the_settings_are_those_of_the_config() -> None:
    ours = inspect.signature(LLM).parameters
    for field in fields(EngineConfig):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert ours[field.name].default == default
    with pytest.raises(ConfigError, match="max_num_seq is not known\nhint: did you mean max_num_seqs"):
        LLM("smollm2-135m", max_num_seq=2)  # type: ignore[call-arg]


def test_text_ids_and_mixed_lists(llm: LLM) -> None:
    text = "The sea"
    ids = llm.tokenizer.encode(text)
    by_text = llm.generate(text, PARAMS)
    assert [o.prompt for o in by_text] == [text]
    assert by_text[0].prompt_token_ids == tuple(ids)
    expected = by_text[0].outputs[0].token_ids
    for prompts in (
        ids,
        tuple(ids),
        [ids],
        np.array(ids),
        [np.array(ids)],
        [np.int64(i) for i in ids],
    ):
        (output,) = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
        assert output.prompt is None
        assert output.prompt_token_ids == tuple(ids)
        assert output.outputs[0].token_ids == expected
    mixed = llm.generate([text, ids, "Other"], PARAMS)
    assert [o.prompt for o in mixed] == [text, None, "Other"]
    assert [o.outputs[0].token_ids for o in mixed[:2]] == [expected] * 2
    assert mixed[2].outputs[0].token_ids != expected
    assert len({o.request_id for o in mixed}) == 3
    assert llm.generate([], PARAMS) == []


def test_one_params_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(seed=1, max_tokens=2, n=2), SamplingParams(seed=1, max_tokens=3)]
    two, one = llm.generate(["a", "a"], each)
    assert [[len(c.token_ids) for c in o.outputs] for o in (two, one)] == [[2, 2], [3]]
    assert two.outputs[0].token_ids == one.outputs[0].token_ids[:2]
    assert [c.index for c in two.outputs] == [0, 1]
    default = llm.generate("a")[0].outputs[0]
    assert len(default.token_ids) <= 128
    assert default.finish_reason in ("stop", "length")


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["a", "b"], [PARAMS], "2 prompts, but 1 sampling params"),
        ("a", [PARAMS, PARAMS], "1 prompts, but 2 sampling params"),
        (["a", "b", ""], PARAMS, "the prompt is empty"),
        (["a", "b", []], PARAMS, "the prompt is empty"),
        (["a", [1, 400]], PARAMS, "prompt token 400 is outside the vocabulary of 300"),
        (["a", [1, 2.5]], PARAMS, "a list of token ids"),
        ([["a", "b"]], PARAMS, "a list of token ids"),
        ([1, "a"], PARAMS, "a list of token ids"),
        (["a", [1] * 501], PARAMS, "501 tokens and max_tokens is 12"),
        (["a", "b"], [PARAMS, SamplingParams(max_tokens=600)], "max_tokens is 600"),
    ],
)
def test_prompts_are_checked_before_any_work(llm: LLM, prompts: Any, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)
    if isinstance(params, SamplingParams) and isinstance(prompts, list):
        with pytest.raises(RequestError, match=words):
            llm.stream(prompts[-1] if prompts[0] != 1 else cast(Any, 1), params)


@pytest.mark.usefixtures("no_step")
def test_a_text_may_encode_to_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: [])
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate("soft hyphens", PARAMS)


def test_chat(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    bye = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bye"}]
    one = llm.chat(hello, PARAMS)
    assert len(one) == 1
    expected = llm.tokenizer.apply_chat_template(hello)
    assert one[0].prompt_token_ids == tuple(expected)
    assert llm.tokenizer.decode(expected, skip_special_tokens=False) == (
        "<|start|>user\nHello<|end|><|start|>assistant\n"
    )
    both = llm.chat([hello, bye], PARAMS)
    assert [o.outputs[0].token_ids for o in both] == [
        o[0].outputs[0].token_ids for o in (one, llm.chat(bye, PARAMS))
    ]


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize(
    "messages", [[], [[]], [{"role": "user"}], "hello", ["hello"], [[{"role": "user", "content": "a"}], []]]
)
def test_malformed_conversations(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, PARAMS)


@pytest.mark.parametrize("params", [{}, {"stop": ["\ufffd", "e"]}, {"temperature": 0}, {"max_tokens": 1}])
def test_streams_add_up(llm: LLM, params: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"seed": 4, "max_tokens": 40, **params})
    expected = llm.generate("abc abc abc", sampling)[0].outputs[0]
    chunks = list(llm.stream("abc abc abc", sampling))
    assert "".join(c.text for c in chunks) == expected.text
    assert tuple(t for c in chunks for t in c.token_ids) == expected.token_ids
    assert [c.output is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    for chunk in chunks:
        assert "".join(text for text, _ in chunk.pieces) == chunk.text
        assert all(text for text, _ in chunk.pieces)
    output = chunks[-1].output
    assert output is not None
    assert (output.text, output.token_ids, output.finish_reason) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
    )


def test_accepted_pieces_are_what_the_statistics_count(tiny_model: Path) -> None:
    """The model is its own draft, greedily: of each full step all but the last token is accepted. All tokens
    are letters here, so that characters count tokens."""
    own = LLM(str(tiny_model), drafts=[str(tiny_model)], tree="1,1", dtype="float32")
    letters = own.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
    params = SamplingParams(seed=1, max_tokens=16, allowed_token_ids=letters)
    chunks = list(own.stream("hello", params))
    output = chunks[-1].output
    assert output is not None
    accepted = sum(len(text) for c in chunks for text, is_accepted in c.pieces if is_accepted)
    assert accepted == output.stats.num_accepted_tokens == 10
    assert sum(len(c.text) for c in chunks) == 16
    assert [len(c.token_ids) for c in chunks] == [1, 3, 3, 3, 3, 3]
    assert chunks[1].pieces == ((chunks[1].text[:2], True), (chunks[1].text[2:], False))


def test_closing_a_stream_early(llm: LLM) -> None:
    with closing(stream(llm, "abc", PARAMS)) as chunks:
        next(chunks)
        assert llm.engine.has_work
    assert not llm.engine.has_work


def test_a_stream_never_read_starts_nothing(llm: LLM) -> None:
    chunks = stream(llm, "abc", PARAMS)
    assert not llm.engine.has_work
    chunks.close()
    dropped = llm.stream("abc", PARAMS)
    del dropped
    with pytest.raises(RequestError, match="n must be 1"):
        llm.stream("abc", SamplingParams(n=2))


def test_streams_side_by_side(llm: LLM) -> None:
    """Whoever steps the engine, each stream gets all of its own text and tokens."""
    expected = [llm.generate(p, PARAMS)[0].outputs[0] for p in ("abc", "xyz")]
    streams = [llm.stream(p, PARAMS) for p in ("abc", "xyz")]
    chunks: list[list[StreamChunk]] = [[next(s)] for s in streams]
    llm.generate("something else", PARAMS)  # runs the streams' requests to their end, too
    for s, seen in zip(streams, chunks, strict=True):
        seen.extend(s)
    for seen, right in zip(chunks, expected, strict=True):
        assert "".join(c.text for c in seen) == right.text
        assert tuple(t for c in seen for t in c.token_ids) == right.token_ids
        assert seen[-1].output is not None
        assert all(c.output is None for c in seen[:-1])


@pytest.mark.parametrize("at_step", [1, 2, 5])
def test_ctrl_c_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    runner = llm.engine.parts.runner
    real = runner.run
    steps = 0

    def run(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == at_step:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", run)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c", "d", "e"], SamplingParams(seed=1, max_tokens=30, n=2))
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    assert llm.generate("a", PARAMS)[0].outputs[0].finish_reason is not None


def test_no_tokenizer(tiny_draft: Path) -> None:
    bare = LLM(str(tiny_draft), dtype="float32")
    with pytest.raises(RequestError, match="no tokenizer") as error:
        bare.generate("text", PARAMS)
    assert error.value.hint == "give prompts as token ids"
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.chat([{"role": "user", "content": "a"}], PARAMS)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        bare.generate([1, 2], SamplingParams(stop="a"))
    output = bare.generate([1, 2], PARAMS)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (12, "")
