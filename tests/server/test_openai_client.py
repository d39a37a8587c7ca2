"""The official client is the judge: everything it does, against a server that really runs."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from specinfer import LLM, SamplingParams
from specinfer.server.fields import SamplingFields

MODEL = "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
HELLO: Any = [{"role": "user", "content": "Hello"}]
UNKNOWN_TYPE = {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> LLM:
    """The same model without a server and without drafts."""
    return LLM(str(tiny_model), dtype="float32")


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL]
    assert client.models.retrieve(MODEL) == models[0]
    with pytest.raises(openai.NotFoundError, match="no model 'other'") as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_completion(client: openai.OpenAI, plain: LLM) -> None:
    answer = client.completions.create(prompt="Hello", max_tokens=20, seed=5, model=MODEL)
    expected = plain.generate("Hello", SamplingParams(max_tokens=20, seed=5))[0]
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == MODEL
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(expected.outputs[0].token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_default_length_is_openais(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="Hello", extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.usage and answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    "prompts",
    ["one", ["one", "two"], [1, 2, 3], [[1, 2, 3], [4, 5]]],
    ids=["text", "texts", "tokens", "token lists"],
)
def test_prompts_in_every_form(client: openai.OpenAI, plain: LLM, prompts: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=3, max_tokens=6)
    outputs = plain.generate(prompts, SamplingParams(n=2, seed=3, max_tokens=6))
    expected = [o.text for output in outputs for o in output.outputs]
    assert [c.text for c in answer.choices] == expected
    assert [c.index for c in answer.choices] == list(range(len(expected)))
    assert answer.usage and answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)


def test_echo(client: openai.OpenAI) -> None:
    bare = client.completions.create(prompt="Hello", max_tokens=4, **GREEDY).choices[0].text
    assert (
        client.completions.create(prompt="Hello", echo=True, max_tokens=4, **GREEDY).choices[0].text
        == "Hello" + bare
    )
    tokens = [71, 68, 75, 75, 78]
    stream = client.completions.create(prompt=tokens, echo=True, stream=True, max_tokens=4, **GREEDY)
    assert (
        "".join(chunk.choices[0].text for chunk in stream)
        == "hello" + client.completions.create(prompt="hello", max_tokens=4, **GREEDY).choices[0].text
    )


def test_completion_stream_is_the_same_text(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "seed": 9, "max_tokens": 15}
    whole = client.completions.create(**arguments)
    texts = [""] * 4
    reasons: list[Any] = [None] * 4
    usages = []
    for chunk in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "a chunk after the last"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.text for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert not any(usages[:-1]) and whole.usage
    assert usages[-1].completion_tokens == whole.usage.completion_tokens


def test_chat(client: openai.OpenAI, plain: LLM) -> None:
    conversation: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Again", "name": "me"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=conversation, seed=4, n=2, max_completion_tokens=12
    )
    flat = [
        {"role": m["role"], "content": "Hello" if isinstance(m["content"], list) else m["content"]}
        for m in conversation
    ]
    expected = plain.chat(flat, SamplingParams(max_tokens=12, seed=4, n=2))[0].outputs
    assert [c.message.content for c in answer.choices] == [o.text for o in expected]
    assert [c.finish_reason for c in answer.choices] == [o.finish_reason for o in expected]
    assert all(c.message.role == "assistant" for c in answer.choices)


def test_chat_stream_is_the_same_text(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 9, "max_tokens": 15}
    whole = client.chat.completions.create(**arguments)
    texts: list[list[str]] = [[], [], []]
    stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        choice = chunk.choices[0]
        if not texts[choice.index]:
            assert choice.delta.role == "assistant"
        texts[choice.index].append(choice.delta.content or "")
    assert ["".join(t) for t in texts] == [c.message.content for c in whole.choices]
    assert len({c.id for c in chunks}) == 1
    running: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        c.usage for c in client.chat.completions.create(**arguments, stream=True, stream_options=running)
    ]
    assert all(0 < a.completion_tokens <= b.completion_tokens for a, b in pairwise(counts[3:]) if a and b)
    assert all(counts[3:]) and counts[-1] == chunks[-1].usage
    assert chunks[-1].choices == [] and chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_takes_what_the_context_leaves(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=HELLO, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.usage and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_the_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "A question of some length."}]
    first = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)  # type: ignore[arg-type]
    messages += [{"role": "user", "content": "And?"}]
    second = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)  # type: ignore[arg-type]
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= len("A question of some length.")


def test_stop_strings(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="Hello", max_tokens=30, **GREEDY).choices[0].text
    stop = text[8:10]
    for streamed in (False, True):
        made: Any = client.completions.create(
            prompt="Hello", max_tokens=30, stop=[stop, "never"], stream=streamed, **GREEDY
        )
        chunks = list(made) if streamed else [made]
        assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == stop


def test_speculation_can_be_seen_and_switched_off(client: openai.OpenAI) -> None:
    def run(**speculation: bool) -> Any:
        return client.completions.create(
            prompt="Hello",
            max_tokens=40,
            extra_body={"speculation": speculation, "ignore_eos": True},
            **GREEDY,
        )

    on, off = run(statistics=True), run(statistics=True, enabled=False)
    assert not hasattr(run(), "metrics")
    assert on.choices[0].text == off.choices[0].text
    with_trees, without = on.metrics["speculative_decoding"], off.metrics["speculative_decoding"]
    assert with_trees["num_accepted_tokens"] == sum(with_trees["accepted_per_pos"]) > 0
    assert with_trees["num_steps"] + with_trees["num_accepted_tokens"] == 40
    assert without["num_steps"] == 40 and without["num_draft_tokens"] == 0


def test_async_client_and_cancelling(server: Any) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            many = [
                client.completions.create(prompt="Hello", max_tokens=30, seed=i, model=MODEL)
                for i in range(8)
            ]
            answers = await asyncio.gather(*many)
            assert len({a.choices[0].text for a in answers}) == 8
            stream = await client.chat.completions.create(
                messages=HELLO, stream=True, extra_body={"ignore_eos": True}, **GREEDY
            )
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            waiting = asyncio.create_task(
                client.completions.create(
                    prompt="Hello", max_tokens=500, extra_body={"ignore_eos": True}, **GREEDY
                )
            )
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(asyncio.wait_for(main(), 60))
    server.wait_until_idle()
    assert not server.engine.has_work


def test_tools_need_a_template_that_shows_them(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError, match="tools: this model's chat template knows none"):
        client.chat.completions.create(messages=HELLO, tools=tools, **GREEDY)
    client.chat.completions.create(messages=HELLO, tools=tools, tool_choice="none", max_tokens=1, **GREEDY)


def test_fields_of_openais_own_service_are_accepted(client: openai.OpenAI) -> None:
    """And change nothing."""
    answer = client.chat.completions.create(
        messages=HELLO, user="me", store=False, metadata={"a": "b"}, service_tier="auto",
        response_format={"type": "text"}, presence_penalty=0, frequency_penalty=0, logit_bias={},
        parallel_tool_calls=True, max_tokens=8, **GREEDY,
    )  # fmt: skip
    without = client.chat.completions.create(messages=HELLO, max_tokens=8, **GREEDY)
    assert answer.choices == without.choices and answer.usage.completion_tokens == 8


def test_every_parameter_reaches_the_engine(client: openai.OpenAI, plain: LLM) -> None:
    own: dict[str, Any] = {
        "min_p": 0.001, "typical_p": 0.95, "repetition_penalty": 1.1, "min_tokens": 5, "bad_words": ["zz"],
        "allowed_token_ids": list(range(250)), "include_stop_str_in_output": True,
        "skip_special_tokens": False, "stop_token_ids": [3], "ignore_eos": True,
    }  # fmt: skip
    openais: dict[str, Any] = {"seed": 5, "max_tokens": 30, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    answer = client.completions.create(
        model=MODEL, prompt="Hello", logit_bias={"7": 5}, extra_body=own, **openais
    )
    params = SamplingParams(logit_bias={7: 5.0}, **own, **openais)
    assert answer.choices[0].text == plain.generate("Hello", params)[0].outputs[0].text


def test_response_formats_and_structured_outputs(client: openai.OpenAI, plain: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["a", 12]}, "minItems": 2, "maxItems": 2}
    by_format: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    arguments: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 1, "max_tokens": 200}
    answer = client.chat.completions.create(**arguments, response_format=by_format)
    params = SamplingParams(seed=1, max_tokens=200, structured_outputs={"json": schema})
    assert answer.choices[0].message.content == plain.chat(HELLO, params)[0].outputs[0].text
    for form in ({"json": schema, "disable_any_whitespace": True}, {"choice": ["yes", "no"]}):
        own = client.chat.completions.create(**arguments, extra_body={"structured_outputs": form})
        text = own.choices[0].message.content
        assert text in ("yes", "no") or len(json.loads(text or "")) == 2
        assert own.choices[0].finish_reason == "stop"
    anything = client.chat.completions.create(**arguments, response_format={"type": "json_object"})
    assert (anything.choices[0].message.content or "").lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(
            **arguments, response_format=by_format, extra_body={"structured_outputs": {"choice": ["a"]}}
        )


def test_every_parameter_is_offered() -> None:
    elsewhere = {"max_tokens", "logprobs"}  # each kind of request has them in its own way
    assert SamplingParams.__dataclass_fields__.keys() - elsewhere <= SamplingFields.model_fields.keys()


def test_completion_logprobs(client: openai.OpenAI, plain: LLM) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Hello",
        "seed": 5,
        "max_tokens": 12,
        "logprobs": 2,
    }
    output = plain.generate("Hello", SamplingParams(seed=5, max_tokens=12, logprobs=2))[0].outputs[0]
    assert output.logprobs is not None
    expected = [s[t].logprob for t, s in zip(output.token_ids, output.logprobs, strict=True)]
    scores: Any = client.completions.create(**arguments).choices[0].logprobs
    assert scores.token_logprobs == expected
    assert all(2 <= len(top) <= 3 for top in scores.top_logprobs)
    assert scores.text_offset[0] == 0 and len(scores.text_offset) == len(scores.tokens) == len(expected)
    chunks = [c.choices[0].logprobs for c in client.completions.create(**arguments, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for c in chunks if c for v in getattr(c, name)] == getattr(scores, name)


def test_echo_with_logprobs(client: openai.OpenAI, plain: LLM) -> None:
    """The prompt's rows are computed, whatever the prefix cache holds of it."""
    for _ in range(2):
        hit: Any = client.completions.create(prompt="Hello", max_tokens=3, **GREEDY)
    assert hit.usage.prompt_tokens_details.cached_tokens == 4
    answer: Any = client.completions.create(
        prompt="Hello", echo=True, logprobs=0, max_tokens=3, n=2, **GREEDY
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    expected = plain.generate("Hello", params)[0]
    assert expected.prompt_logprobs is not None
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:5] == [
            scores[token].logprob
            for token, scores in zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True)
            if scores is not None
        ]
        assert len(choice.logprobs.tokens) == 8
    asked: Any = client.completions.create(
        prompt="Hello", max_tokens=1, extra_body={"prompt_logprobs": 1}, **GREEDY
    )
    assert asked.choices[0].prompt_logprobs[0] is None
    assert [len(scores) >= 1 for scores in asked.choices[0].prompt_logprobs[1:]] == [True] * 4


def test_chat_logprobs(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": HELLO, "seed": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 3
    }  # fmt: skip
    whole: Any = client.chat.completions.create(**arguments).choices[0].logprobs
    for token in whole.content:
        assert len(token.top_logprobs) == 3
        tops = [t.logprob for t in token.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert token.token.startswith("<0x") or bytes(token.bytes).decode() == token.token
    chunks = [c.choices[0].logprobs for c in client.chat.completions.create(**arguments, stream=True)]
    assert [t for c in chunks if c for t in c.content] == whole.content


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"top_p": 1.5}, "top_p", r"\(0, 1\]"),
        ({"temperature": -1}, "temperature", r"\[0, 100\]"),
        ({"n": 0}, "n", r"\[1, 1024\]"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be in"),
        ({"max_tokens": 1000}, "max_tokens", "context of 512"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"extra_body": {"top_q": 1}}, "top_q", "unknown field 'top_q'"),
        ({"extra_body": {"priority": 0, "ttft": -1}}, "ttft", "seconds"),
        (
            {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}},
            "response_format",
            "schema",
        ),
        (
            {"extra_body": {"response_format": UNKNOWN_TYPE}},
            "response_format",
            "response_format.json_schema.schema cannot be compiled",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "cannot be compiled"),
        ({"extra_body": {"structured_outputs": {"xml": "("}}}, "structured_outputs", "xml is not known"),
        ({"extra_body": {"logit_bias": {"x": 1.0}}}, "logit_bias", "logit_bias"),
        ({"stop": ["a"] * 10_000}, "stop", "at most 64"),
        ({"prompt": ""}, None, "empty"),
        ({"prompt": [300]}, "prompt", "outside the vocabulary of 300"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ],
)
def test_bad_requests_name_the_field(
    client: openai.OpenAI, arguments: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as error:
        client.completions.create(**{"model": MODEL, "prompt": "Hello", **arguments})
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"


def test_bad_types_are_unprocessable(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as error:
        client.completions.create(model=MODEL, prompt="Hello", extra_body={"top_k": "many"})
    assert error.value.param == "top_k"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hello")
