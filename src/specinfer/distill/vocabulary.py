"""The subset of the target's vocabulary that a draft works on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.distill.lessons import Lesson


def token_counts(lessons: Sequence[Lesson], vocab_size: int) -> NDArray[np.float64]:
    """[vocab_size] how often a token is in the texts, plus how often the target would expect to write it."""
    counts = np.zeros(vocab_size)
    for lesson in lessons:
        counts += np.bincount(lesson.text.tokens, minlength=vocab_size)
        expected = np.exp(lesson.top_logprobs.astype(np.float64)).ravel()
        counts += np.bincount(lesson.top_ids.ravel(), weights=expected, minlength=vocab_size)
    return counts


def choose_vocab(
    counts: NDArray[np.float64], size: int, always: Collection[int] = ()
) -> NDArray[np.int64] | None:
    """[size] target ids: `always`, then the most frequent; None if that is all of them.

    Among equals the lower id is kept: byte-pair vocabularies list common tokens first. The rarest comes first
    in the result and the others by id: draft id 0 also stands for every token outside the subset.
    """
    if size >= len(counts):
        return None
    is_optional = ~np.isin(np.arange(len(counts)), list(always))
    kept = np.lexsort((-counts, is_optional))[:size]
    return np.concatenate([kept[-1:], np.sort(kept[:-1])])


def draft_ids(vocab: NDArray[np.int64] | None, vocab_size: int) -> NDArray[np.int64]:
    """[vocab_size] target id -> draft id, -1 outside the subset."""
    if vocab is None:
        return np.arange(vocab_size)
    result = np.full(vocab_size, -1, np.int64)
    result[vocab] = np.arange(len(vocab))
    return result
