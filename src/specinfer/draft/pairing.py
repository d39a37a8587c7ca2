"""Pairing: how a draft's tokens stand to the target's, found before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specinfer.cache import KVPool
from specinfer.draft.history import OwnHistories, SharedHistories
from specinfer.draft.vocabulary import DraftVocab, Ints
from specinfer.errors import ConfigError
from specinfer.models.loader import Checkpoint
from specinfer.models.tokenizer import Tokenizer

MIN_OVERLAP = 0.1
"""The least share of the smaller vocabulary that both must have for a draft with another tokenizer."""

SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "In 1969, 600 million people watched; it's estimated that 94% of all TVs were on!",
    "def area(r):\n    return 3.14159 * r ** 2  # in m\N{SUPERSCRIPT TWO}\n",
    '{"name": "Zoë", "tags": ["naïve", "café"], "n": null}',
    "Der Fluß heißt Donau.\n\n\tЧто это?",
    "\N{CJK UNIFIED IDEOGRAPH-4F60}\N{CJK UNIFIED IDEOGRAPH-597D}, 안녕 \N{SMILING FACE WITH SUNGLASSES}",
)
"""What both tokenizers read at load, to say in the log how alike they split."""


@dataclass(frozen=True)
class Pairing:
    """How a draft's tokens stand to the target's.

    finding: what was found, for the log.
    vocab: None where the draft's ids are the target's (with any padding behind them).
    tokenizers: the target's and the draft's where they split texts differently, else None.
    """

    finding: str
    vocab: DraftVocab | None
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None

    def histories(self, pool: KVPool, max_tokens: int) -> SharedHistories | OwnHistories:
        """What the draft reads, kept in its `pool`. max_tokens: histories from this length on go unread."""
        if self.tokenizers is None:
            return SharedHistories(None if self.vocab is None else self.vocab.to_draft)
        return OwnHistories(pool, *self.tokenizers, max_tokens)


def pair(name: str, draft: Checkpoint, target: Checkpoint, tokenizer: Tokenizer | None) -> Pairing:
    """tokenizer: the target's. Raises ConfigError for a draft that cannot help."""
    size, own_size = target.config.vocab_size, draft.config.vocab_size
    if draft.draft_vocab is not None:
        if int(draft.draft_vocab.max()) >= size:
            raise ConfigError(
                f"draft {name}: its vocabulary names token {draft.draft_vocab.max()}, of {size}"
            )
        vocab = DraftVocab.of_subset(draft.draft_vocab, size, draft.embeds_draft_vocab)
        reads = ", reads its hidden rows" if draft.reads_features else ""
        return Pairing(f"{len(draft.draft_vocab)} of the target's {size} tokens{reads}", vocab)
    own = draft.tokenizer()
    if own is not None and tokenizer is not None and own.vocab != tokenizer.vocab:
        return _compare(name, own, own_size, tokenizer, size)
    if own is None or tokenizer is None:
        finding = "taken to have the target's tokens, there is no tokenizer to compare"
        # What lies beyond the tokenizer's last token is padding.
        is_padded = tokenizer is not None and min(own_size, size) > max(tokenizer.vocab.values())
        if own_size != size and not is_padded:
            raise ConfigError(
                f"draft {name}: its vocabulary ({own_size} tokens) is not the target's ({size})",
                hint="use a draft made for this target, one with a tokenizer of its own, or ngram",
            )
    else:
        num_alike = sum(own.encode(s, False) == tokenizer.encode(s, False) for s in SAMPLES)
        finding = f"the target's tokenizer, {num_alike} of {len(SAMPLES)} texts split alike"
    if own_size != size:
        finding += f", vocabularies padded to {own_size} and {size}"
    return Pairing(finding, DraftVocab.of_subset(np.arange(own_size), size) if own_size < size else None)


def _compare(name: str, own: Tokenizer, own_size: int, tokenizer: Tokenizer, size: int) -> Pairing:
    """Of tokenizers that do not list the same tokens under the same ids."""
    ours, theirs = tokenizer.spellings[:size], own.spellings[:own_size]
    target_ids, draft_ids = _common(ours, theirs)
    vocab = DraftVocab.of_common(target_ids, draft_ids, size)
    num_common, num_ours, num_theirs = len(target_ids), sum(map(bool, ours)), sum(map(bool, theirs))
    num_alike = sum(_split(own, s) == _split(tokenizer, s) for s in SAMPLES)
    found = (
        f"{num_common} of its {num_theirs} tokens are among the target's {num_ours}, "
        f"{num_alike} of {len(SAMPLES)} texts split alike"
    )
    if {theirs[i] for i in own.ordinary_ids if i < own_size} == {
        ours[i] for i in tokenizer.ordinary_ids if i < size
    }:
        num_moved = int((target_ids != draft_ids).sum())
        return Pairing(
            f"the target's tokenizer but for special tokens, {num_moved} under other ids: {found}", vocab
        )
    overlap = num_common / min(num_ours, num_theirs)
    if overlap < MIN_OVERLAP:
        raise ConfigError(
            f"draft {name}: its tokenizer has too little in common with the target's: {found}; "
            f"{overlap:.1%} of the smaller vocabulary, at least {MIN_OVERLAP:.0%} is needed",
            hint="use a draft whose tokenizer is nearer to the target's, or ngram",
        )
    return Pairing(f"another tokenizer: {found}", vocab, (tokenizer, own))


def _split(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.spellings[token] for token in tokenizer.encode(text, add_special_tokens=False)]


def _common(ours: list[bytes], theirs: list[bytes]) -> tuple[Ints, Ints]:
    """Tokens spelled alike: target ids, ascending, and draft ids, each once. The same id on both sides goes
    first; then, of several spellings alike on one side, the later: SentencePiece lists bare bytes first."""
    is_same = [bool(a) and a == b for a, b in zip(ours, theirs, strict=False)]
    pairs = {i: i for i, same in enumerate(is_same) if same}
    free = {s: i for i, s in enumerate(theirs) if s and i not in pairs}
    for i in range(len(ours) - 1, -1, -1):
        if i not in pairs and ours[i] in free:
            pairs[i] = free.pop(ours[i])
    target_ids = np.array(sorted(pairs), np.int64)
    return target_ids, np.array([pairs[i] for i in target_ids], np.int64)
