"""Detokenizer: text as tokens arrive, whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


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
        self._stop = tuple(stop)
        self._min_tokens = len(before) + min_tokens
        self._include_stop = include_stop
        self._longest_stop = max(map(len, self._stop), default=0)
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
        known = self._decode(self._ids[self._prefix : self._read])
        both = self._decode(self._ids[self._prefix :])
        stop = None
        if not both.endswith(INCOMPLETE) and len(both) > len(known):
            stop = self._append(both[len(known) :])
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
        if self._include_stop:
            return len(self.text)
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return len(self.text) - length
        return len(self.text)

    def _append(self, new: str) -> str | None:
        self._prefix, self._read = self._read, len(self._ids)
        known = len(self.text)
        self.text += new
        if self._read <= self._min_tokens:
            return None
        found = [(at, s) for s in self._stop if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop
