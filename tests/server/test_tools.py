"""Tools: what the model writes as a call is one to the official client, in every format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.server.tool_calls import FORMATS, CallReader

HERMES, MISTRAL, LLAMA = FORMATS
ANSWER_BEGINS = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
TEMPLATES = {
    "hermes": (
        "{% if tools %}Tools: {{ tools | tojson }}, called as <tool_call>JSON</tool_call>{% endif %}"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|end|>{% endfor %}" + ANSWER_BEGINS
    ),
    "llama": (
        "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.tool_calls %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", '
        '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% else %}{% if loop.first %}{{ tools | tojson }}{% endif %}{{ m.content }}{% endif %}"
        "<|end|>{% endfor %}" + ANSWER_BEGINS
    ),
    "mistral": (
        "{{ tools | tojson }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}"
        "{% endif %}<|end|>{% endfor %}" + ANSWER_BEGINS
    ),
}
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Oslo"]}}}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: Any = [{"role": "user", "content": "Is it warm?"}]
WRITTEN = {
    "hermes": 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}}',
    "mistral": 'I look. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, '
    '{"name": "now", "arguments": {}}]',
}
BAD_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}
CALLS = [("weather", {"city": "Rome"}), ("now", {})]


@pytest.fixture(scope="module", params=TEMPLATES)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(
    form: str, serving: Any, write_model: Any, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """The official client on a random model whose template writes calls in one of the formats."""
    path = write_model(tmp_path_factory.mktemp(form), max_position_embeddings=2048)
    settings_path = path / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    settings_path.write_text(json.dumps({**settings, "chat_template": TEMPLATES[form]}))
    with serving(model=str(path)) as server, server.client() as connected:
        yield connected


def ask(client: openai.OpenAI, stream: bool, **arguments: Any) -> Any:
    """The message and why it ended, streamed or not."""
    arguments = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "seed": 1, **arguments}
    if not stream:
        choice = client.chat.completions.create(**arguments).choices[0]
        return choice.message, choice.finish_reason
    with client.chat.completions.stream(**arguments) as events:
        choice = events.get_final_completion().choices[0]
        return choice.message, choice.finish_reason


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_written_call_is_one(client: openai.OpenAI, form: str, stream: bool) -> None:
    written = {"structured_outputs": {"choice": [WRITTEN[form]]}}
    message, reason = ask(client, stream, extra_body=written)
    assert (message.content or None) == (None if form == "llama" else "I look.")
    assert calls_of(message) == CALLS and reason == "tool_calls"
    assert len({c.id for c in message.tool_calls}) == 2
    message, reason = ask(client, stream, extra_body=written, parallel_tool_calls=False)
    assert calls_of(message) == CALLS[:1]
    for other in ("none", "auto"):
        text = WRITTEN[form] if other == "none" else WRITTEN[form].replace('"weather"', '"whether"', 1)[:60]
        message, reason = ask(
            client, stream, tool_choice=other, extra_body={"structured_outputs": {"choice": [text]}}
        )
        assert (message.content, message.tool_calls, reason) == (text, None, "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_can_be_forced(client: openai.OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    message, reason = ask(client, stream, tool_choice=named)
    [(name, arguments)] = calls_of(message)
    assert name == "weather" and arguments in ({"city": "Rome"}, {"city": "Oslo"})
    assert not message.content and reason == "tool_calls"
    message, reason = ask(client, stream, tool_choice="required", parallel_tool_calls=False)
    [(name, arguments)] = calls_of(message)
    assert name in ("weather", "now") and reason == "tool_calls"
    messages = [
        *QUESTION,
        message,
        {"role": "tool", "content": "10", "tool_call_id": message.tool_calls[0].id},
    ]
    assert ask(client, False, messages=messages, max_tokens=1)[1] == "length"


def test_what_cannot_be_forced(client: openai.OpenAI) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    bad = {"name": "f", "parameters": {"type": "nope"}}
    bad_tools = [*TOOLS, {"type": "function", "function": bad}]
    for arguments, words in (
        ({"tool_choice": other}, "tool_choice asks for a function that is not among tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice asks for a function"),
        (
            {"tool_choice": "required", "tools": bad_tools},
            r"tools\[2\].function.parameters cannot be compiled: Invalid type: nope",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, "JSON text of an object"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, False, **arguments)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f", "arguments": {}}',
     '{"name": "f", "parameters": {"a": "</tool_call>"}}', '{"name": "g", "arguments": {}}', "[", "]", ",",
     ";", "{", "}", '"', " ", "\n", "a", "<", "<tool", "\\ud800", "NaN", "[" * 2000]
)  # fmt: skip


@given(form=st.sampled_from(FORMATS), pieces=st.lists(PIECES, max_size=12), size=st.integers(1, 20))
def test_calls_do_not_depend_on_how_the_text_comes(form: Any, pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    whole = CallReader(form, ["f"]).read(text, is_end=True)
    reader, content, calls = CallReader(form, ["f"]), "", []
    for start in range(0, len(text), size):
        new, made = reader.read(text[start : start + size], is_end=False)
        content += new
        calls += made
        assert text.startswith(content) or calls
    new, made = reader.read("", is_end=True)
    assert (content + new, calls + made) == whole
    assert whole[1] or whole[0] == text


def test_a_tag_before_llamas_calls() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"x": "\N{SNOWMAN}"}}'
    assert CallReader(LLAMA, ["f"]).read(text, is_end=True) == ("", [("f", '{"x": "\N{SNOWMAN}"}')])
