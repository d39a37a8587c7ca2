"""DraftVocab: which of a draft's tokens the target has, and under which ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DraftVocab:
    """A draft whose token ids are not simply the target's.

    columns: [common] columns of its head that are tokens of the target, or None where all are.
    to_target: [common] the target ids of these columns, each once.
    to_draft: [target vocabulary] ids fed to the embedding (0 for tokens that the draft lacks), or None where
    the embedding takes the target's ids.
    """

    columns: Ints | None
    to_target: Ints
    to_draft: Ints | None

    @staticmethod
    def of_subset(target_ids: Ints, target_size: int, is_embedded: bool = True) -> DraftVocab:
        """A draft whose head (and embedding, where `is_embedded`) has the tokens `target_ids` in order."""
        if not is_embedded:
            return DraftVocab(None, target_ids, None)
        return DraftVocab(None, target_ids, _fed(target_ids, np.arange(len(target_ids)), target_size))

    @staticmethod
    def of_common(target_ids: Ints, draft_ids: Ints, target_size: int) -> DraftVocab:
        """A draft that calls `target_ids` (ascending) `draft_ids`, and has nothing else in common."""
        return DraftVocab(draft_ids, target_ids, _fed(target_ids, draft_ids, target_size))


def _fed(target_ids: Ints, draft_ids: Ints, target_size: int) -> Ints:
    to_draft = np.zeros(target_size, np.int64)
    to_draft[target_ids] = draft_ids
    return to_draft
