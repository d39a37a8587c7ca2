"""Log probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.outputs import Logprob, TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """[n], of each row's token and of the k likeliest. logits: [n, V] of any float type, as the model gave
    them.

    Row by row on the host, one thread: a row's bits do not depend on what is computed beside it.
    """
    return [
        _of_row(row.float().cpu().numpy(), token, k) for row, token in zip(logits, token_ids, strict=True)
    ]


def _of_row(row: NDArray[np.float32], token: int, k: int) -> TokenLogprobs:
    top = row.max()
    normaliser = float(top) + float(np.log(np.exp(row - top).sum(dtype=np.float64)))
    rank = 1 + int((row > row[token]).sum()) + int((row[:token] == row[token]).sum())
    found = {token: Logprob(float(row[token]) - normaliser, rank)}
    k = min(k, len(row))
    if k:
        bound = np.partition(row, len(row) - k)[len(row) - k]
        columns = np.flatnonzero(row >= bound)
        columns = columns[np.lexsort((columns, -row[columns]))][:k]
        for i, column in enumerate(columns.tolist(), 1):
            found.setdefault(column, Logprob(float(row[column]) - normaliser, i))
    return found
