"""Penalties: tokens that have occurred become less likely, or more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class Penalties:
    """Repetition (prompt and output), frequency and presence penalty (output), in this order, as in vLLM.

    Work per row is bounded by the distinct tokens that occurred: those of the history are counted once, as it
    grows, and those of a path on top of it.
    """

    def __init__(self, repetition: float, frequency: float, presence: float, num_prompt_tokens: int) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._places: dict[int, int] = {}
        self._token_ids: NDArray[np.int64] = np.zeros(64, np.int64)
        # How often each was generated: 0 for those of the prompt alone.
        self._counts: NDArray[np.float32] = np.zeros(64, np.float32)

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        while self._num_counted < len(history):
            self._count(history[self._num_counted])
        token_ids, counts = self._with_path(path)
        columns = torch.from_numpy(token_ids).to(logits.device)
        values = logits[columns]
        if self._repetition != 1.0:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        generated = torch.from_numpy(counts).to(logits.device)
        if self._frequency != 0.0:
            values -= generated * self._frequency
        if self._presence != 0.0:
            values -= (generated > 0) * self._presence
        logits[columns] = values

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token
        self._counts[place] += self._num_counted >= self._num_prompt_tokens
        self._num_counted += 1

    def _with_path(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct tokens of history and path, and how often each was generated."""
        num_known = len(self._places)
        new = dict.fromkeys(token for token in path if token not in self._places)
        token_ids = np.concatenate([self._token_ids[:num_known], np.array(list(new), np.int64)])
        counts = np.concatenate([self._counts[:num_known], np.zeros(len(new), np.float32)])
        places = {token: num_known + i for i, token in enumerate(new)}
        for token in path:
            counts[places[token] if token in places else self._places[token]] += 1
        return token_ids, counts
