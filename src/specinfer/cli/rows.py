"""The rows of a batch's input file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specinfer.errors import ConfigError, RequestError
from specinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specinfer.llm import LLM

KINDS = ("prompt", "messages", "prompt_token_ids")
EXAMPLE = 'a row looks like {"prompt": "The sea is"}'
HINTS = {
    "structured_outputs": "set it for all of them: --json-schema or --regex",
    "prompt_logprobs": "the Python interface and the server have them",
}
SETTINGS = frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True)
class InputRow:
    """index: place among the rows, from 0. where: `file:line`. content: the value of `kind`."""

    index: int
    where: str
    id: str | int | None
    kind: str
    content: Any

    def token_ids(self, llm: LLM) -> list[int]:
        """The prompt as the model reads it. Raises RequestError."""
        if self.kind == "prompt_token_ids":
            return list(self.content)
        if self.kind == "messages":
            return llm.tokenizer.apply_chat_template(self.content)
        return llm.tokenizer.encode(self.content)


def read_rows(path: Path) -> list[InputRow]:
    """Every row, its shape checked. Raises ConfigError or RequestError naming the line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="name a file of JSON lines") from None
    rows: list[InputRow] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_parse(line, f"{path}:{number}", len(rows)))
    if not rows:
        raise ConfigError(f"{path} holds no rows", hint=EXAMPLE)
    return rows


def _parse(line: bytes, where: str, index: int) -> InputRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON: {error}", hint=EXAMPLE) from None
    if not isinstance(row, dict):
        raise RequestError(f"{where}: a row must be an object, not {type(row).__name__}", hint=EXAMPLE)
    kinds = [kind for kind in KINDS if kind in row]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none of them"
        raise RequestError(f"{where}: a row has one of {', '.join(KINDS)}; here: {found}", hint=EXAMPLE)
    settings = sorted(SETTINGS & row.keys())
    if settings:
        flag = settings[0].replace("_", "-")
        raise RequestError(
            f"{where}: {settings[0]} cannot be set for a single row",
            hint=HINTS.get(settings[0], f"set it for all of them: --{flag}"),
        )
    row_id = row.get("id")
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, str | int)):
        raise RequestError(f"{where}: id must be a string or an integer, got {row_id!r}")
    content = row[kinds[0]]
    problem = _problem(kinds[0], content)
    if problem:
        raise RequestError(f"{where}: {problem}", hint=EXAMPLE)
    return InputRow(index, where, row_id, kinds[0], content)


def _problem(kind: str, content: object) -> str | None:
    if kind == "prompt":
        if not isinstance(content, str):
            return f"prompt must be a string, got {content!r:.40}"
        return None if content else "the prompt is empty"
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        return f"{kind} must be a list that is not empty"
    if kind == "prompt_token_ids" and not all(type(token) is int for token in content):
        return "prompt_token_ids must be integers"
    return None
