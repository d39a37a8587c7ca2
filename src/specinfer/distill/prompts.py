"""What the target is asked, and which prompts are kept from training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specinfer.errors import ConfigError, RequestError
from specinfer.models.tokenizer import Tokenizer

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
NUM_BUCKETS = 20
EXAMPLE = 'a line looks like {"messages": [{"role": "user", "content": "Hello"}]}'


@dataclass(frozen=True)
class Prompt:
    """One thing to answer: a conversation, or a text to go on with (then `messages` is empty)."""

    kind: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @staticmethod
    def of_turns(kind: str, turns: Sequence[str]) -> Prompt:
        """User and assistant in turn."""
        return Prompt(kind, tuple((("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)))

    def token_ids(self, tokenizer: Tokenizer, is_chat: bool) -> list[int]:
        """As the target reads it. is_chat: `takes_chat`; where it is false, a conversation is plain text."""
        if not self.messages:
            return tokenizer.encode(self.text)
        if not is_chat:
            return tokenizer.encode("".join(f"{content}\n\n" for _, content in self.messages))
        return tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in self.messages]
        )


def takes_chat(tokenizer: Tokenizer) -> bool:
    """Whether the target has a chat template."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except RequestError:
        return False
    return True


def part_of(prompt_token_ids: Sequence[int]) -> Part:
    """Where a prompt belongs, by its tokens alone: whatever is added later, it stays there.

    1 in 20 is for validation (early stopping), 1 in 20 for the test (judging), the rest for training.
    """
    digest = hashlib.sha256(np.asarray(prompt_token_ids, np.int64).tobytes()).digest()
    bucket = int.from_bytes(digest[:8], "big") % NUM_BUCKETS
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def digest(prompts: Sequence[Prompt]) -> str:
    """Names a list of prompts."""
    content = json.dumps([[p.kind, p.messages, p.text] for p in prompts])
    return f"{len(prompts)} prompts, sha256 {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def read_prompts(path: Path) -> list[Prompt]:
    """A file of prompts. Raises ConfigError or RequestError naming the line.

    *.jsonl: lines with `messages`, `prompt` (a text to go on with) or `turns` (a user's, the first of which
    is asked), and a `kind` or `category` if wanted. Anything else is plain text: each paragraph is gone on
    with.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="name a file of prompts") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}", hint="name a file of prompts") from None
    if path.suffix in (".jsonl", ".json"):
        lines = [(f"{path}:{number}", line) for number, line in enumerate(content.split("\n"), 1)]
        prompts = [_parse(line, where) for where, line in lines if line.strip()]
    else:
        paragraphs = (paragraph.strip() for paragraph in content.split("\n\n"))
        prompts = [Prompt("text", text=paragraph) for paragraph in paragraphs if paragraph]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", hint=EXAMPLE)
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON: {error}", hint=EXAMPLE) from None
    if not isinstance(row, dict):
        raise RequestError(f"{where}: a line must be an object, not {type(row).__name__}", hint=EXAMPLE)
    kind = str(row.get("kind") or row.get("category") or "prompt")
    if _is_text(row.get("prompt")):
        return Prompt(kind, text=row["prompt"])
    turns = row.get("turns")
    if isinstance(turns, list) and turns and _is_text(turns[0]):
        return Prompt.of_turns(kind, turns[:1])
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return Prompt(kind, tuple((m["role"], m["content"]) for m in messages))
    raise RequestError(f"{where}: neither messages nor prompt nor turns that can be asked", hint=EXAMPLE)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
