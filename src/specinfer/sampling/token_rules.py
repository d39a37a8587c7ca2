"""Token rules: which tokens may be chosen, and by how much some are favoured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class AllowedTokens:
    """Bans every token but these."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._banned = torch.ones(vocab_size, dtype=torch.bool)
        self._banned[list(token_ids)] = False

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        self._banned = self._banned.to(logits.device)
        logits.masked_fill_(self._banned, -torch.inf)


class BadWords:
    """Bans the last token of a word whose other tokens the output ends with."""

    def __init__(self, words: Sequence[Sequence[int]], num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._last_tokens: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self._last_tokens.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(start) for start in self._last_tokens})

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        longest = self._lengths[-1]
        first = max(self._num_prompt_tokens, len(history) - longest)
        output = (*history[first:], *path)
        banned: list[int] = []
        for length in self._lengths:
            if length <= len(output):
                banned += self._last_tokens.get(output[len(output) - length :], ())
        if banned:
            logits[banned] = -torch.inf


class MinTokens:
    """Bans the tokens that end a request until it has generated `min_tokens`."""

    def __init__(self, end_token_ids: Sequence[int], min_tokens: int, num_prompt_tokens: int) -> None:
        self._end_token_ids = list(end_token_ids)
        self._min_length = num_prompt_tokens + min_tokens

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        if len(history) + len(path) < self._min_length:
            logits[self._end_token_ids] = -torch.inf


class LogitBias:
    """Adds to the logits of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._token_ids = torch.tensor(list(biases), dtype=torch.int64)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32)

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        logits[self._token_ids] += self._biases.to(logits.device)
