"""Lessons as tensors, and the order in which they are learnt from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.distill.lessons import Lesson

MAX_CONTEXT = 1024
"""Of a longer text the end is learnt from."""
MICRO_TOKENS = 2048
"""Tokens of one forward, padding included: what memory allows."""


@dataclass(frozen=True)
class MicroBatch:
    """Texts padded on the right to one length, and what is known of the tokens after `rows`.

    token_ids: [texts, length] as the student is fed them. rows: [n] into the flattened tokens. top_ids: [n,
    k] draft ids, -1 where the student has no such token. top_probs: [n, k]. weights: [n]. features: [texts,
    length, hidden] the target's last hidden row of the position before each, 0 before the first; fp16 until
    they are used; None where the lessons have none.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    weights: torch.Tensor
    features: torch.Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return MicroBatch(**{name: x.to(device) for name, x in tensors.items() if x is not None})


def micro_batch(
    lessons: Sequence[Lesson],
    weights: Sequence[NDArray[np.float32]],
    draft_ids: NDArray[np.int64],
    fed_ids: NDArray[np.int64],
) -> MicroBatch:
    """weights: [answer] for each lesson. draft_ids, fed_ids: [target vocabulary], see Student."""
    # The last token is learnt, not read.
    texts = [lesson.text.tokens[:-1][-MAX_CONTEXT:] for lesson in lessons]
    length = max(len(text) for text in texts)
    token_ids = np.zeros((len(texts), length), np.int64)
    rows, kept = [], []
    for i, (lesson, text) in enumerate(zip(lessons, texts, strict=True)):
        token_ids[i, : len(text)] = fed_ids[text]
        n = min(lesson.text.num_rows, len(text))
        rows.append(i * length + np.arange(len(text) - n, len(text)))
        kept.append(n)
    top_ids = np.concatenate([x.top_ids[-n:] for x, n in zip(lessons, kept, strict=True)])
    top_logprobs = np.concatenate([x.top_logprobs[-n:] for x, n in zip(lessons, kept, strict=True)])
    return MicroBatch(
        torch.from_numpy(token_ids),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(draft_ids[top_ids]),
        torch.from_numpy(np.exp(top_logprobs.astype(np.float32))),
        torch.from_numpy(np.concatenate([w[-n:] for w, n in zip(weights, kept, strict=True)])),
        features_before(lessons, texts, length),
    )


def features_before(
    lessons: Sequence[Lesson], texts: Sequence[NDArray[np.int64]], length: int
) -> torch.Tensor | None:
    """MicroBatch.features. texts: the tokens that are read of each lesson, which are its last but one."""
    rows = [lesson.features.read() for lesson in lessons if lesson.features is not None]
    if not rows:
        return None
    result = np.zeros((len(texts), length, rows[0].shape[1]), np.float16)
    for into, text, own in zip(result, texts, rows, strict=True):
        before = own[:-1][-len(text) :]
        into[len(text) - len(before) : len(text)] = before
    return torch.from_numpy(result)


def micro_batches(lengths: NDArray[np.int64], chosen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The chosen lessons by length, in groups of at most MICRO_TOKENS with padding; a longer one is alone."""
    order = chosen[np.argsort(lengths[chosen], kind="stable")]
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] * (end + 1 - start) > MICRO_TOKENS:
            yield order[start:end]
            start = end


def steps(
    lengths: NDArray[np.int64], batch_tokens: int, num_epochs: int, seed: int
) -> list[NDArray[np.int64]]:
    """[step] the lessons of each optimizer step: about `batch_tokens` of a fresh order in every epoch."""
    result = []
    for epoch in range(num_epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
        place = (np.cumsum(lengths[order]) - 1) // batch_tokens
        result += np.split(order, np.flatnonzero(np.diff(place)) + 1)
    return result


def text_lengths(lessons: Sequence[Lesson]) -> NDArray[np.int64]:
    """[lesson] tokens that are read."""
    return np.array([min(len(lesson.text.tokens) - 1, MAX_CONTEXT) for lesson in lessons], np.int64)
