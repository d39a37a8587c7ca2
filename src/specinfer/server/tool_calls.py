"""Tool calls: how models write them. Read back from a text as it comes, and as a grammar that forces them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

from specinfer.errors import RequestError
from specinfer.models.tokenizer import Tokenizer

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_OPEN = "[TOOL_CALLS]"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
CANONICAL = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` and the templates write it."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Call(NamedTuple):
    """A call of a function; arguments: JSON text."""

    name: str
    arguments: str


Found = tuple[list[Any], int]
"""What a text may hold at its start that are calls, and where they end."""


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls.

    openers: what a call may begin with. only_first: nothing but calls may precede it.
    read: what stands in a text that begins with an opener; None where it is not whole (the second argument:
    nor will be). separators: characters that may follow a call and are no text.
    begin, one, between, end: Lark rules for several calls, of `open`, `close` (the first opener and its
    counterpart) and `call`, an object whose arguments stand under `key`.
    """

    openers: tuple[str, ...]
    read: Callable[[str, bool], Found | None]
    key: str
    close: str = ""
    only_first: bool = False
    separators: str = " \t\r\n"
    begin: str = ""
    one: str = "call"
    between: str = ""
    end: str = ""

    def find(self, text: str, is_first: bool) -> int:
        """Where the first call begins, or may, once the text goes on; len(text) if nowhere."""
        if self.only_first:
            start = len(text) - len(text.lstrip())
            rest = text[start:]
            may = is_first and any(o.startswith(rest) or rest.startswith(o) for o in self.openers)
            return start if may else len(text)
        opener = self.openers[0]
        whole = text.find(opener)
        if whole >= 0:
            return whole
        longest = range(min(len(opener) - 1, len(text)), 0, -1)
        return len(text) - next((n for n in longest if text.endswith(opener[:n])), 0)

    def grammar(self, tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]], is_single: bool) -> str:
        """Lark whose texts are calls of these functions, one or more, and nothing else."""
        rules = [
            " ".join(["start:", self.begin, self.one, "" if is_single else self._more(), self.end]),
            f"open: {literal(tokenizer, self.openers[0])}",
            "call: " + " | ".join(f"call{i}" for i in range(len(functions))),
        ]
        if self.close:
            rules.append(f"close: {literal(tokenizer, self.close)}")
        for i, function in enumerate(functions):
            schema = {**(function.get("parameters") or NO_PARAMETERS), "x-guidance": CANONICAL}
            head = f'{{"name": {json.dumps(function["name"])}, "{self.key}": '
            rules.append(f'call{i}: {json.dumps(head)} arguments{i} "}}"')
            rules.append(f"arguments{i}: %json {json.dumps(schema)}")
        return "\n".join(rules)

    def _more(self) -> str:
        return f"({self.between} {self.one})*"


def read_hermes(text: str, is_end: bool) -> Found | None:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>. The answer's end closes it, too."""
    found = json_at(text, len(HERMES_OPEN))
    if found is None:
        return None
    value, end = found
    rest = text[end:].lstrip()
    if rest.startswith(HERMES_CLOSE):
        return [value], len(text) - len(rest) + len(HERMES_CLOSE)
    return ([value], len(text)) if is_end and not rest else None


def read_llama(text: str, is_end: bool) -> Found | None:
    """{"name": ..., "parameters": {...}}, behind <|python_tag|> or not; several with semicolons between."""
    found = json_at(text, len(LLAMA_TAG) if text.startswith(LLAMA_TAG) else 0)
    return found and ([found[0]], found[1])


def read_mistral(text: str, is_end: bool) -> Found | None:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]"""
    found = json_at(text, len(MISTRAL_OPEN))
    return found and (found[0] if isinstance(found[0], list) else [found[0]], found[1])


FORMATS = (
    CallFormat(
        (HERMES_OPEN,),
        read_hermes,
        "arguments",
        close=HERMES_CLOSE,
        one=r'open "\n" call "\n" close',
        between=r'"\n"',
    ),
    CallFormat((MISTRAL_OPEN,), read_mistral, "arguments", begin='open " "? "["', between='", "', end='"]"'),
    CallFormat(
        ("{", LLAMA_TAG), read_llama, "parameters", only_first=True, separators=" \t\r\n;", between='"; "'
    ),
)


class CallReader:
    """Splits one answer into text and calls as it comes.

    What may become a call is held until that is certain; what is none is text. A call is of a function that
    was offered, with an object of arguments. White space around calls is no text.
    """

    def __init__(self, form: CallFormat | None, names: Iterable[str], is_single: bool = False) -> None:
        """form: None for a model whose calls are not known: all is text. is_single: only the first counts."""
        self.num_calls = 0
        self._form = form
        self._names = frozenset(names)
        self._is_single = is_single
        self._held = ""
        self._is_first = True  # nothing but calls so far
        self._is_after_call = False

    def read(self, text: str, is_end: bool) -> tuple[str, list[Call]]:
        """What has become certain with the next part of the answer: text, and calls after it."""
        if self._form is None:
            return text, []
        self._held += text
        content, calls = "", []
        while True:
            if self._is_after_call:
                self._held = self._held.lstrip(self._form.separators)
            start = self._form.find(self._held, self._is_first)
            found = self._form.read(self._held[start:], is_end) if start < len(self._held) else None
            made = self._as_calls(found[0]) if found else None
            if found and made:
                content += self._text(start).rstrip()
                self._held = self._held[found[1] :]
                self._is_after_call = True
                calls += made
            elif found or (is_end and start < len(self._held)):
                content += self._text(start + 1)  # an opener that opens nothing
            else:
                break
        content += self._text(start if is_end else len(self._held[:start].rstrip()))
        kept = calls[: max(0, 1 - self.num_calls)] if self._is_single else calls
        self.num_calls += len(kept)
        return content, kept

    def _text(self, length: int) -> str:
        """What is held up to there, which is no call."""
        text, self._held = self._held[:length], self._held[length:]
        if text.strip():
            self._is_first = self._is_after_call = False
        return text

    def _as_calls(self, values: Sequence[Any]) -> list[Call] | None:
        calls = [self._as_call(value) for value in values]
        return None if None in calls else [call for call in calls if call is not None]

    def _as_call(self, value: Any) -> Call | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return None if LONE_SURROGATE.search(text) else Call(name, text)


def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """The one in which the chat template writes an earlier turn's call; None where it is none of FORMATS."""
    function = {"name": "look_up", "description": "", "parameters": {"type": "object", "properties": {}}}
    called = {"name": "look_up", "arguments": {"key": "value"}}
    question: dict[str, Any] = {"role": "user", "content": "Hello"}
    call = {"id": "000000000", "type": "function", "function": called}  # Mistral's have nine characters
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": function}]
    try:
        texts = [
            tokenizer.decode(tokenizer.apply_chat_template(messages, tools), skip_special_tokens=False)
            for messages in ([question], [question, answer])
        ]
    except RequestError:
        return None
    turn = texts[1].removeprefix(commonprefix(texts))
    for form in FORMATS:
        if CallReader(form, ["look_up"]).read(turn, is_end=True)[1]:
            return form
    return None


def literal(tokenizer: Tokenizer, text: str) -> str:
    """A marker in Lark: its own token where there is one, which the model was taught."""
    token = tokenizer.vocab.get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value at `start`, white space aside, and where it ends; None where none is whole."""
    begin = len(text) - len(text[start:].lstrip())
    try:
        return STRICT.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None


def no_constant(name: str) -> None:
    """Python reads NaN and Infinity, which are no JSON."""
    raise ValueError(name)


STRICT = json.JSONDecoder(parse_constant=no_constant)
