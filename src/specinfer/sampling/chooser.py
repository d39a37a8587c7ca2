"""Chooser: from logits to the target's choice, and to what a draft ranks by (design.md 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.sampling.noise import NoiseCache, native
from specinfer.sampling.pipeline import divisor, is_only_divided, is_sampled, process
from specinfer.sampling.row import Row


class Chooser:
    """Chooses by argmax(processed logit / T + g), g the noise row of the position; g = 0 at temperature 0.

    One noise cache serves the target and its drafts. Logits are [n, V] of any float type, on the cache's
    device, one `Row` for each row.
    """

    def __init__(self, noise: NoiseCache) -> None:
        self.noise = noise

    def perturbed(
        self, logits: torch.Tensor, rows: Sequence[Row], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n, V] fp32, processed logits + g; may be `logits` itself when there is nothing to add.

        token_ids: [V], the target's id of each column, where the columns are a subset of its vocabulary.
        Raises ValueError for more columns than the noise has tokens.
        """
        out = process(logits, rows, token_ids, self.noise.num_tokens)
        sampled = [i for i, row in enumerate(rows) if is_sampled(row)]
        if not sampled:
            return out
        g = self.noise.rows([rows[i].noise_key for i in sampled])
        if token_ids is not None:
            g = g.index_select(1, token_ids)
        elif out.shape[1] > self.noise.num_tokens:
            raise ValueError(f"{out.shape[1]} logits a row, but noise for {self.noise.num_tokens} tokens")
        else:
            g = g[:, : out.shape[1]]
        if len(sampled) == len(rows):
            return out + g if out is logits else out.add_(g)
        if out is logits:
            out = out.clone()
        out[sampled] += g
        return out

    def choose(self, logits: torch.Tensor, rows: Sequence[Row]) -> NDArray[np.int64]:
        """[n], the target's choice after each row; the lowest id wins a tie."""
        if not any(is_sampled(row) or row.processors for row in rows):
            return _first_argmax(logits)
        if native is None or logits.device.type != "cpu":
            return _first_argmax(self.perturbed(logits, rows))
        scales = [divisor(row) for row in rows]
        if not all(is_only_divided(row, logits.shape[1]) for row in rows):
            logits, scales = process(logits, rows), [1.0] * len(rows)
        logits = logits.float().contiguous()
        return np.array([_choose(*each) for each in zip(logits, scales, rows, strict=True)], np.int64)

    def choose_one(self, logits: NDArray[np.float32], row: Row) -> int:
        """`choose` for one row [V] on the host."""
        if not is_sampled(row) and not row.processors:
            return int(logits.argmax())
        return int(self.choose(torch.from_numpy(logits)[None], [row])[0])

    def law_of_one(self, logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
        """`probabilities` for one row [V] on the host."""
        law: NDArray[np.float64] = self.probabilities(torch.from_numpy(logits)[None], [row])[0]
        return law

    def probabilities(
        self, logits: torch.Tensor, rows: Sequence[Row], token_ids: torch.Tensor | None = None
    ) -> NDArray[np.float64]:
        """[n, V] fp64 on the host, the law that a row's token is drawn from; one-hot at temperature 0."""
        processed = process(logits, rows, token_ids, self.noise.num_tokens)
        p: NDArray[np.float64] = processed.double().cpu().numpy()
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(axis=1, keepdims=True)
        greedy = [i for i, row in enumerate(rows) if not is_sampled(row)]
        if greedy:
            p[greedy] = 0.0
            p[greedy, _first_argmax(processed[greedy])] = 1.0
        return p


def _choose(logits: torch.Tensor, scale: float, row: Row) -> int:
    """A row's choice, argmax(logits / scale + g), by the extension. logits: [V] fp32."""
    if is_sampled(row):
        return int(native.choose(logits.data_ptr(), len(logits), scale, *row.noise_key))
    return int(logits.numpy().argmax())


def _first_argmax(x: torch.Tensor) -> NDArray[np.int64]:
    """[n], the first column of each row's maximum; x: [n, V], or [0, V]."""
    if x.device.type != "cpu":
        return x.argmax(dim=1).cpu().numpy()
    # numpy's argmax is ten times quicker than torch's here (49152 columns: 5 us a row), and widening bf16
    # first (15 us) beats torch's bf16 argmax (215 us).
    choices: NDArray[np.int64] = x.float().numpy().argmax(axis=1)
    return choices
