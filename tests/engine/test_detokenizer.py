"""Text as tokens arrive: whole characters, stop strings however they are split, nothing ever taken back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.engine.detokenizer import Detokenizer


def make(pieces: list[bytes], stop: list[str] | None = None, min_tokens: int = 0) -> Detokenizer:
    """A detokenizer over a vocabulary of byte strings; token i is pieces[i]."""
    return Detokenizer(lambda ids: decode([pieces[i] for i in ids]), stop or [], min_tokens)


def decode(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


@st.composite
def split(draw: st.DrawFn, content: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes cut into tokens at any place, between the bytes of a character too."""
    data = draw(content)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12)))
    return [data[a:b] for a, b in pairwise([0, *cuts, len(data)]) if a < b]


def by_byte(data: bytes) -> list[bytes]:
    return [bytes([b]) for b in data]


def visible(pieces: list[bytes], n: int) -> str:
    """What n tokens make certain: all of it, unless the end is no whole character; naive."""
    text = decode(pieces[:n])
    return text if n == 0 or not text.endswith("\ufffd") else visible(pieces, n - 1)


TEXT = st.text(max_size=20).map(lambda s: s.encode())
LETTERS = st.text("abé", max_size=14).map(lambda s: s.encode())
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4)


@given(split(TEXT))
def test_text_equals_the_full_decode(pieces: list[bytes]) -> None:
    full = decode(pieces)
    detokenizer = make(pieces)
    for i in range(len(pieces)):
        assert detokenizer.add(i) is None
        assert full.startswith(detokenizer.text), "half a character was emitted"
        assert detokenizer.ends[-1] == len(detokenizer.text) == detokenizer.safe_length()
    assert detokenizer.flush() is None
    assert detokenizer.text == full
    assert len(detokenizer.ends) == len(pieces)


@given(split(st.binary(max_size=20)))
def test_bytes_that_are_no_text(pieces: list[bytes]) -> None:
    full = decode(pieces)
    detokenizer = make(pieces)
    for i in range(len(pieces)):
        detokenizer.add(i)
        assert full.startswith(detokenizer.text)
    detokenizer.flush()
    assert detokenizer.text == full


def test_incomplete_bytes_wait_and_come_out_at_the_end() -> None:
    euro = "€".encode()
    detokenizer = make([b"a", euro[:1], euro[1:2], euro[2:], euro[:2]])
    texts = []
    for i in range(5):
        detokenizer.add(i)
        texts.append(detokenizer.text)
    assert texts == ["a", "a", "a", "a€", "a€"]
    detokenizer.flush()
    assert detokenizer.text == "a€\ufffd"


@settings(max_examples=200)
@given(st.one_of(split(LETTERS), LETTERS.map(by_byte)), STOPS, st.integers(0, 6))
def test_stop_strings_against_the_naive_way(pieces: list[bytes], stops: list[str], min_tokens: int) -> None:
    """The first token whose text completes a stop string is the last; the text ends before that string."""
    detokenizer = make(pieces, stops, min_tokens)
    safe = 0
    sent = ""
    stop = None
    for i in range(len(pieces)):
        before, now = visible(pieces, i), visible(pieces, i + 1)
        # Occurrences that end in what this token added; those in earlier text would have ended it before,
        # or stand within min_tokens.
        places = [
            (at, s)
            for s in stops
            for at in range(len(now))
            if now.startswith(s, at) and at + len(s) > len(before)
        ]
        stop = detokenizer.add(i)
        if places and i + 1 > min_tokens:
            assert stop == min(places)[1]
            assert detokenizer.text == now[: min(places)[0]]
            break
        assert stop is None
        assert detokenizer.text == now
        assert detokenizer.safe_length() >= safe
        safe = detokenizer.safe_length()
        sent = now[:safe]
    if stop is None and detokenizer.flush() is None:
        assert detokenizer.text == decode(pieces)
    assert detokenizer.text.startswith(sent), "text that was called safe was taken back"


@given(split(LETTERS), STOPS)
def test_only_what_may_begin_a_stop_string_is_held(pieces: list[bytes], stops: list[str]) -> None:
    detokenizer = make(pieces, stops)
    for i in range(len(pieces)):
        if detokenizer.add(i) is not None:
            break
        held = detokenizer.text[detokenizer.safe_length() :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_overlapping_stop_strings() -> None:
    letters = [b"x", b"a", b"b", b"a", b"b", b"c"]
    detokenizer = make(letters, ["abc", "bc"])
    stops = [detokenizer.add(i) for i in range(6)]
    assert stops == [None] * 5 + ["abc"]  # the one that begins first
    assert detokenizer.text == "xab"
    shorter = make(letters, ["abab", "ba"])
    assert [shorter.add(i) for i in range(4)] == [None, None, None, "ba"]  # complete a token earlier
    assert shorter.text == "xa"


def test_a_stop_string_that_waits_for_its_character() -> None:
    """A stop string inside a token that also begins a character: found when the tokens end, at the latest."""
    pieces = [b"a!" + "é".encode()[:1]]
    detokenizer = make(pieces, ["!"])
    assert detokenizer.add(0) is None
    assert detokenizer.flush() == "!"
    assert detokenizer.text == "a"


def test_tokens_of_no_text_are_not_decoded_again_and_again() -> None:
    """As special tokens are, when they are left out; what comes after them is text as ever."""
    decoded = 0

    def count(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode([[b"", b"a", b"b"][i] for i in ids])

    detokenizer = Detokenizer(count, ["ba"], min_tokens=1004)
    for token in [1, *[0] * 1000, 2, 1, *[0] * 10, 2]:
        assert detokenizer.add(token) is None
    assert detokenizer.add(1) == "ba"
    assert detokenizer.text == "aba"
    assert detokenizer.ends[:3] + detokenizer.ends[-3:] == [1, 1, 1, 3, 4, 3]
    assert decoded < 30_000


def test_bytes_that_are_never_a_character_are_not_decoded_again_and_again() -> None:
    decoded = 0

    def count(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode([[b"\xff", b"a"][i] for i in ids])

    detokenizer = Detokenizer(count, [])
    for token in [0] * 1000 + [1]:
        detokenizer.add(token)
    assert detokenizer.text == "\ufffd" * 1000 + "a"
    assert decoded < 20_000
