"""Pairing: what is found about a draft's tokens before a weight is read."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from specinfer.draft.pairing import Pairing, pair
from specinfer.errors import ConfigError
from specinfer.models.loader import open_checkpoint
from specinfer.models.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ByteLevel = Callable[..., Backend]
WithTokenizer = Callable[..., Path]


def paired(target: Path, draft: Path) -> Pairing:
    checkpoint = open_checkpoint(target)
    return pair("d", open_checkpoint(draft), checkpoint, checkpoint.tokenizer())


@pytest.fixture
def with_tokenizer(tiny_model: Path, tmp_path: Path, save_tokenizer: Callable[..., Path]) -> WithTokenizer:
    """with_tokenizer(tokenizer): the tiny model with another tokenizer (its weights do not fit any more)."""

    def write(backend: Backend, **named: str) -> Path:
        directory = Path(shutil.copytree(tiny_model, tmp_path / f"draft{backend.get_vocab_size()}"))
        save_tokenizer(backend, directory, **named)
        config = json.loads((directory / "config.json").read_text())
        size = backend.get_vocab_size()
        (directory / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
        return directory

    return write


def check_common(pairing: Pairing, target: Path, draft: Path) -> int:
    """Tokens are mapped where they are spelled alike, each once; returns how many."""
    vocab = pairing.vocab
    assert vocab is not None and vocab.columns is not None and vocab.to_draft is not None
    ours, theirs = (Tokenizer.from_directory(d).spellings for d in (target, draft))
    assert all(ours[t] == theirs[d] != b"" for t, d in zip(vocab.to_target, vocab.columns, strict=True))
    assert (np.diff(vocab.to_target) > 0).all()
    assert len(set(vocab.columns)) == len(vocab.columns)
    assert set(ours) & set(theirs) - {b""} == {ours[t] for t in vocab.to_target}
    assert (vocab.to_draft[vocab.to_target] == vocab.columns).all()
    return len(vocab.to_target)


def test_the_same_tokens(tiny_model: Path, tiny_draft: Path, tmp_path: Path, write_model: Any) -> None:
    same = paired(tiny_model, tiny_model)
    assert same.vocab is None and same.tokenizers is None
    assert same.finding == "the target's tokenizer, 6 of 6 texts split alike"
    assert paired(tiny_model, tiny_draft).vocab is None
    wide = write_model(tmp_path / "wide", vocab_size=320, tokenizer=False)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, wide)
    assert paired(tiny_model, wide).vocab is None
    narrow = paired(wide, tiny_model)
    assert narrow.vocab is not None and narrow.tokenizers is None
    assert narrow.vocab.columns is None
    assert narrow.vocab.to_target.tolist() == list(range(300))
    assert narrow.finding.endswith("vocabularies padded to 300 and 320")


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_other_special_tokens(
    tiny_model: Path, byte_level: ByteLevel, with_tokenizer: WithTokenizer, is_shuffled: bool
) -> None:
    """By id where the ids agree, by string where they do not; the ordinary tokens may have moved, too."""
    order = random.Random(0).sample(ALPHABET, 256) if is_shuffled else ALPHABET
    backend = byte_level(order, [])
    backend.add_special_tokens(["<|end|>", "<other>"])
    draft = with_tokenizer(backend)
    pairing = paired(tiny_model, draft)
    assert pairing.tokenizers is None
    assert check_common(pairing, tiny_model, draft) == 257
    assert "257 of its 258 tokens are among the target's 300, 6 of 6 texts split alike" in pairing.finding
    assert ("but for special tokens, 1 under other ids" in pairing.finding) == (not is_shuffled)


def test_another_tokenizer(
    tiny_model: Path, spelled_otherwise: Backend, with_tokenizer: WithTokenizer
) -> None:
    draft = with_tokenizer(spelled_otherwise)
    pairing = paired(tiny_model, draft)
    assert pairing.tokenizers is not None
    assert check_common(pairing, tiny_model, draft) == 257
    assert pairing.finding.startswith("another tokenizer: 257 of its 266 tokens are among the target's 300, ")
    assert pairing.finding.endswith("of 6 texts split alike")
    back = paired(draft, tiny_model)
    assert back.tokenizers is not None
    assert check_common(back, draft, tiny_model) == 257


def test_a_character_goes_before_its_byte(
    tiny_model: Path, sentencepiece: Backend, with_tokenizer: WithTokenizer
) -> None:
    """SentencePiece spells `a` twice, as itself and as the byte to fall back on."""
    draft = with_tokenizer(sentencepiece, bos_token="<s>", unk_token="<unk>")
    for ours, theirs in ((tiny_model, draft), (draft, tiny_model)):
        pairing = paired(ours, theirs)
        assert check_common(pairing, ours, theirs) == 256
        a, other_a = (Tokenizer.from_directory(d).vocab["a"] for d in (ours, theirs))
        assert pairing.vocab is not None and pairing.vocab.to_draft is not None
        assert pairing.vocab.to_draft[a] == other_a


@pytest.mark.parametrize(("num_known", "is_refused"), [(0, True), (9, True), (10, False)])
def test_too_little_in_common(
    tiny_model: Path,
    byte_level: ByteLevel,
    with_tokenizer: WithTokenizer,
    num_known: int,
    is_refused: bool,
) -> None:
    pieces = [*ALPHABET[:num_known], *(f"Ġword{i}" for i in range(100 - num_known))]
    draft = with_tokenizer(byte_level(pieces, []))
    if not is_refused:
        assert check_common(paired(tiny_model, draft), tiny_model, draft) == num_known
        return
    with pytest.raises(
        ConfigError, match=f"{num_known} of its 100 tokens are among the target's 300"
    ) as error:
        paired(tiny_model, draft)
    assert f"{num_known / 100:.1%} of the smaller vocabulary, at least 10% is needed" in str(error.value)
    assert "ngram" in str(error.value)
