"""What a feature draft has of its target: the head, taken when it is loaded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.errors import ConfigError
from specinfer.models.loader import Checkpoint
from specinfer.models.weights import WeightSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class BorrowedHead:
    """A feature draft's weights; its tied embedding is the target's head, the rows of the draft's tokens."""

    def __init__(self, draft: Checkpoint, target: Checkpoint) -> None:
        self._weights: WeightSource = draft.weights
        self._vocab = draft.draft_vocab
        self._target = target

    def names(self) -> Collection[str]:
        return [*self._weights.names(), EMBEDDING]

    def get(self, name: str) -> torch.Tensor:
        if name != EMBEDDING:
            return self._weights.get(name)
        return head_rows(self._target, self._vocab)


def head_rows(target: Checkpoint, vocab: NDArray[np.int64] | None) -> torch.Tensor:
    """[tokens, hidden_size] of a target's head: those of `vocab`, None for all. Raises ModelError."""
    rows = target.weights.get(EMBEDDING if target.config.tie_embeddings else HEAD)
    return rows if vocab is None else rows[torch.from_numpy(vocab)]


def borrow(name: str, draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    """A feature draft with its target's head; any other as it is. Raises ConfigError for another target's."""
    if not draft.reads_features:
        return draft
    own, config = draft.config, target.config
    if target.is_foreign or config.rope is None or config.embedding_size != config.hidden_size:
        raise ConfigError(
            f"draft {name} reads its target's hidden rows, which a {config.model_type} does not give",
            hint="use a draft that reads tokens alone, or ngram",
        )
    num_tokens = config.vocab_size if draft.draft_vocab is None else len(draft.draft_vocab)
    if own.hidden_size != config.hidden_size or own.vocab_size != num_tokens or not own.tie_embeddings:
        raise ConfigError(
            f"draft {name} reads hidden rows of {own.hidden_size}, the target's have {config.hidden_size}",
            hint="use the draft with the very target it was made for",
        )
    return replace(draft, weights=BorrowedHead(draft, target))
