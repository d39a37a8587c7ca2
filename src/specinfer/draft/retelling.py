"""Retelling: a request's text in the tokens of a draft that has another tokenizer."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from specinfer.models.tokenizer import Tokenizer

# Where a word starts after something that is no space, tokenizers start a token, whatever follows.
_WORD_START = re.compile(r"(?<=\S)(?= [^\W\d_])")
# Where they mostly do, in texts without such places.
_BREAK = re.compile(r"(?<=[\s.,;:!?\u3001\u3002])(?=\S)")
_MAX_UNSETTLED = 200
_KEPT = 20
"""Characters that are not settled yet when it must be settled somewhere: a token is seldom longer."""


class Retelling:
    """Keeps one request's tokens in another tokenizer as the request grows.

    What stands before the last word is settled; the rest, of some 200 characters at most, is read anew each
    time, as the tokens of a word may change while it grows. Nothing but acceptance depends on how good the
    retelling is.
    """

    def __init__(self, tokenizer: Tokenizer, own: Tokenizer) -> None:
        """tokenizer: the target's; own: the draft's."""
        self._tokenizer = tokenizer
        self._own = own
        self._start()

    def _start(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read: list[int] = []
        self._has_text = False
        self._settled = list(self._own.opening)
        # The space that the tokenizer reads before a text: `encode_part` leaves one out.
        self._unsettled = " " if self._own.adds_space else ""

    def tell(self, tokens: Sequence[int]) -> list[int] | None:
        """All of the request's `tokens` as the draft's; None while they end within a character."""
        if list(tokens[: len(self._read)]) != self._read:
            self._start()  # a path that was not committed after all
        self._unsettled += self._text(tokens[len(self._read) :])
        self._read += tokens[len(self._read) :]
        if self._decoder.getstate()[0]:
            return None
        if end := _settled_end(self._unsettled):
            self._settled += self._own.encode_part(self._unsettled[:end])
            self._unsettled = self._unsettled[end:]
        return self._settled + self._own.encode_part(self._unsettled)

    def _text(self, new: Sequence[int]) -> str:
        """What `new` adds to the text; special tokens are written out, but for the one that opens it."""
        spellings = self._tokenizer.spellings
        if not self._read and list(new[:1]) == [self._tokenizer.bos_token_id]:
            new = new[1:]
        text = self._decoder.decode(b"".join(spellings[t] for t in new if t < len(spellings)))
        if text and not self._has_text:
            self._has_text = True
            return text.removeprefix(" ") if self._tokenizer.adds_space else text
        return text


def _settled_end(text: str) -> int:
    """How much of a text will have the same tokens whatever follows, as far as one can tell."""
    starts = [match.start() for match in _WORD_START.finditer(text)]
    if starts:
        return starts[-1]
    last = len(text) - _KEPT
    if len(text) <= _MAX_UNSETTLED:
        return 0
    return max((match.start() for match in _BREAK.finditer(text, 0, last)), default=last)
