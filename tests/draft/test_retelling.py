"""Retelling: however the text arrives, the draft's tokens are those of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from specinfer.draft.retelling import Retelling
from specinfer.models.tokenizer import Tokenizer

TEXTS = st.lists(st.sampled_from([*"abthe 12.,\n", " the", " an", "é", "你"]), max_size=30).map("".join)
Three = dict[str, Tokenizer]


@pytest.fixture(scope="module")
def three(
    tiny_model: Path,
    spelled_otherwise: Backend,
    sentencepiece: Backend,
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Three:
    """Bytes alone; byte-level with merges; SentencePiece."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "bytes": Tokenizer.from_directory(tiny_model),
        "merges": Tokenizer.from_directory(save_tokenizer(spelled_otherwise, root / "merges")),
        "pieces": Tokenizer.from_directory(
            save_tokenizer(sentencepiece, root / "pieces", bos_token="<s>", unk_token="<unk>")
        ),
    }


@pytest.fixture(scope="module")
def words(
    wordpiece: Backend, save_tokenizer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """WordPiece, which cannot tell a text back."""
    return Tokenizer.from_directory(save_tokenizer(wordpiece, tmp_path_factory.mktemp("words")))


@given(text=TEXTS)
def test_spellings_are_the_text(three: Three, text: str) -> None:
    for name, tokenizer in three.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        before = " " if name == "pieces" and text else ""
        assert b"".join(tokenizer.spellings[i] for i in ids) == (before + text).encode()
    assert [t.adds_space for t in three.values()] == [False, False, True]
    assert [t.opening for t in three.values()] == [(), (), (1,)]


def test_words_are_spelled_with_their_space(words: Tokenizer) -> None:
    ids = words.encode("the ant, and 12.")
    assert [words.spellings[i] for i in ids] == [b" the", b" an", b"t", b",", b" an", b"d", b" 12", b"."]
    assert words.adds_space


@given(
    text=TEXTS,
    source=st.sampled_from(["bytes", "merges", "pieces"]),
    own=st.sampled_from(["bytes", "merges", "pieces", "words"]),
    data=st.data(),
)
def test_in_steps_it_is_the_whole(
    three: Three, words: Tokenizer, text: str, source: str, own: str, data: st.DataObject
) -> None:
    """After every step: the draft's encoding of the text so far, or None within a character."""
    tokenizer, draft = three[source], {**three, "words": words}[own]
    tokens = tokenizer.encode(text)
    retelling = Retelling(tokenizer, draft)
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        so_far = b"".join(tokenizer.spellings[t] for t in tokens[len(tokenizer.opening) : end])
        try:
            expected = draft.encode(so_far.decode().removeprefix(" " if source == "pieces" else ""))
        except UnicodeDecodeError:
            expected = None
        assert retelling.tell(tokens[:end]) == expected


@pytest.mark.parametrize(
    "text", ["你好吗" * 200, "0.125, " * 150, "1\n" * 400, "x" * 900], ids=lambda t: t[:6]
)
def test_text_without_words_is_not_read_again_and_again(
    three: Three, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, draft = three["bytes"], three["merges"]
    lengths: list[int] = []
    encode = draft.encode_part
    monkeypatch.setattr(draft, "encode_part", lambda part: lengths.append(len(part)) or encode(part))
    retelling = Retelling(tokenizer, draft)
    tokens = tokenizer.encode(text)
    told: list[int] = []
    for end in [*range(3, len(tokens), 3), len(tokens)]:
        told = retelling.tell(tokens[:end]) or told
    assert b"".join(draft.spellings[t] for t in told) == text.encode()
    assert max(lengths) <= 210
    assert len(told) <= 1.1 * len(draft.encode(text)) + 2


def test_a_path_that_was_not_committed(three: Three) -> None:
    tokenizer, draft = three["bytes"], three["merges"]
    retelling = Retelling(tokenizer, draft)
    for text in ("a the ab", "a the abc an", "a th", "a the ab", ""):
        assert retelling.tell(tokenizer.encode(text)) == draft.encode(text)


def test_special_tokens_are_written_out(three: Three) -> None:
    """Those that the draft has are read as such, and BOS is each tokenizer's own."""
    tokenizer, draft = three["bytes"], three["merges"]
    told = Retelling(tokenizer, draft).tell(tokenizer.encode("ab<|end|><|start|>"))
    assert told == [*draft.encode("ab"), draft.vocab["<|end|>"], *draft.encode("<|start|>")]
    assert Retelling(tokenizer, three["pieces"]).tell(tokenizer.encode("a")) == three["pieces"].encode("a")
    assert Retelling(three["pieces"], draft).tell(three["pieces"].encode("a")) == draft.encode("a")
