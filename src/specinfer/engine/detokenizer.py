"""Detokenizer: text as tokens arrive, whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
FEW_TOKENS = 8
"""Enough to hold any character's bytes."""


@lru_cache(256)
def borders(text: str) -> tuple[int, ...]:
    """[i] the longest part of text[: i + 1] that it begins and ends with, itself aside."""
    found = [0]
    for char in text[1:]:
        length = found[-1]
        while length and text[length] != char:
            length = found[length - 1]
        found.append(length + (text[length] == char))
    return tuple(found)


class StopString:
    """How much of one stop string the text ends with, by Knuth, Morris and Pratt: a step must not cost what
    the string is long.

    matched: characters, fewer than all.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = borders(text)

    def read(self, new: str) -> int | None:
        """Follow what the text goes on with; returns how much of it the first whole stop string needs."""
        end = None
        for position, char in enumerate(new, 1):
            while self.matched and self.text[self.matched] != char:
                self.matched = self._borders[self.matched - 1]
            self.matched += self.text[self.matched] == char
            if self.matched == len(self.text):
                end = end or position
                self.matched = self._borders[-1]
        return end


class Detokenizer:
    """Turns one request's tokens into text: what they add to the text of the tokens before them.

    `text` is what is certain. A character whose bytes are not all there waits; `flush` ends the waiting. Stop
    strings that are complete within the first min_tokens tokens are text like any other.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        min_tokens: int = 0,
        include_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        """include_stop: let the text end with the stop string, not before it.

        before: tokens of whole characters; behind none, a tokenizer may leave out a first word's space.
        """
        self._decode = decode
        self._stops = [StopString(s) for s in stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._include_stop = include_stop
        self._ids = list(before)
        # Decoded together so that a tokenizer which treats a text's start apart does so once:
        # [prefix, read) was decoded before, [read, end) is new.
        self._prefix, self._read = 0, len(before)
        self.text = ""
        self.ends: list[int] = []
        """Length of `text` after each token."""

    def add(self, token_id: int) -> str | None:
        """Take one token. Returns the stop string that its text completed: `text` then ends there."""
        self._ids.append(token_id)
        self._num_tokens += 1
        stop = None
        if not self._is_broken():
            known = self._decode(self._ids[self._prefix : self._read])
            both = self._decode(self._ids[self._prefix :])
            if not both.endswith(INCOMPLETE) and len(both) > len(known):
                stop = self._append(both[len(known) :])
            elif both == known and len(self._ids) - self._read > 2 * FEW_TOKENS:
                del self._ids[self._read : -FEW_TOKENS]  # tokens of no text, as special ones are
        self.ends.append(len(self.text))
        return stop

    def skip(self) -> None:
        """Take a token that is no text."""
        self.ends.append(len(self.text))

    def flush(self) -> str | None:
        """End of the tokens: what still waited comes out as it is."""
        known = self._decode(self._ids[self._prefix : self._read])
        return self._append(self._decode(self._ids[self._prefix :])[len(known) :])

    def safe_length(self) -> int:
        """How much of `text` no later token can take back: what may begin a stop string is held, unless stop
        strings stay."""
        held = 0 if self._include_stop else max((s.matched for s in self._stops), default=0)
        return len(self.text) - held

    def _is_broken(self) -> bool:
        """Whether many tokens wait, and the last few show that all still do: bytes that are no text must not
        be decoded again with every token."""
        is_long = len(self._ids) - self._read > 2 * FEW_TOKENS
        return is_long and self._decode(self._ids[-FEW_TOKENS:]).endswith(INCOMPLETE)

    def _append(self, new: str) -> str | None:
        self._prefix, self._read = self._read, len(self._ids)
        known = len(self.text)
        self.text += new
        ends = [(s.text, s.read(new)) for s in self._stops]
        found = [(known + end - len(text), text) for text, end in ends if end is not None]
        if not found or self._num_tokens <= self._min_tokens:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop
