"""How a draft picks a node's children: the best of a perturbed row, or draws from q."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.sampling.noise import native

Picked = tuple[list[int], list[float]]
"""Columns, best first, and each one's score in [0, 1]."""


def pick_top(perturbed: torch.Tensor, counts: Sequence[int]) -> list[Picked]:
    """Each row's best columns: `counts[i]` of row i. perturbed: [n, V] fp32, from `Chooser.perturbed`.

    Fewer when fewer survive the processors; the lowest column wins a tie, as it does in the target's
    choice. A score is the column's share in the softmax of the perturbed row: an estimate, from the gaps
    between perturbed scores (design.md 2), that the target makes this choice.
    """
    if perturbed.device.type != "cpu":
        return _pick_on_device(perturbed, counts)
    if native is None:
        return [_pick(row, count) for row, count in zip(perturbed.float().numpy(), counts, strict=True)]
    rows, width = perturbed.float().contiguous(), perturbed.shape[1]
    start = rows.data_ptr()
    return [native.pick(start + 4 * width * i, width, min(count, width)) for i, count in enumerate(counts)]


def _pick_on_device(perturbed: torch.Tensor, counts: Sequence[int]) -> list[Picked]:
    """All rows at once: few launches, and only what was picked crosses to the host."""
    widest = min(max(counts, default=0), perturbed.shape[1])
    if widest < 1:
        return [([], []) for _ in counts]
    values = perturbed.topk(widest, dim=1).values
    last = torch.as_tensor([max(min(count, widest), 1) - 1 for count in counts], device=perturbed.device)
    # Where fewer survive than are wanted, the last one is -inf, and all columns would reach it.
    bounds = values.gather(1, last.unsqueeze(1)).clamp_min_(torch.finfo(torch.float32).min)
    # topk promises no order among ties, so take all that reach the last one's value and sort here.
    rows, columns = (perturbed >= bounds).nonzero(as_tuple=True)
    found = perturbed[rows, columns]
    logs = found - torch.logsumexp(perturbed, dim=1)[rows]
    row_of, column_of = rows.cpu().numpy(), columns.cpu().numpy()
    value_of, score_of = found.cpu().numpy(), np.exp(logs.double().cpu().numpy()).clip(0.0, 1.0)
    order = np.lexsort((column_of, -value_of, row_of))
    order = order[value_of[order] > -np.inf]
    starts = np.searchsorted(row_of[order], np.arange(len(counts) + 1))
    result: list[Picked] = []
    for row, count in enumerate(counts):
        mine = order[starts[row] : min(starts[row + 1], starts[row] + max(count, 0))]
        result.append((column_of[mine].tolist(), score_of[mine].tolist()))
    return result


def _pick(row: NDArray[np.float32], count: int) -> Picked:
    """One row on a CPU without the extension."""
    count = min(count, len(row))
    if count < 1:
        return [], []
    top = row.max()
    bound = top if count == 1 else np.partition(row, len(row) - count)[len(row) - count]
    columns = np.flatnonzero(row >= max(bound, np.finfo(np.float32).min))
    columns = columns[np.lexsort((columns, -row[columns]))][:count]
    shares = np.exp(row - top)
    scores = shares[columns] / shares.sum(dtype=np.float64)
    return columns.tolist(), scores.clip(0.0, 1.0).tolist()


def draw_iid(q: NDArray[np.float64], count: int, generator: np.random.Generator) -> list[int]:
    """`count` independent draws from q, [V] fp64, in draw order; never a token of probability 0.

    Raises ValueError when q has no mass.
    """
    cumulative = _cumulative(q)
    if cumulative is None:
        raise ValueError("q has no probability mass")
    return [_draw(generator.random(), cumulative) for _ in range(count)]


def draw_without_replacement(q: NDArray[np.float64], count: int, generator: np.random.Generator) -> list[int]:
    """Up to `count` different draws from q, [V] fp64, in draw order, each from q without the earlier ones,
    renormalised. Fewer when q's support is smaller: a number that depends on q only."""
    rest = q.astype(np.float64)
    drawn: list[int] = []
    while len(drawn) < count and (cumulative := _cumulative(rest)) is not None:
        drawn.append(_draw(generator.random(), cumulative))
        rest[drawn[-1]] = 0.0
    return drawn


def _cumulative(weights: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Running sums, None when there is no mass."""
    cumulative = np.cumsum(weights)
    return cumulative if len(cumulative) and cumulative[-1] > 0.0 else None


def _draw(u: float, cumulative: NDArray[np.float64]) -> int:
    """The index whose share covers u in [0, 1)."""
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # Rounding can put u * total on the total itself: the last index that adds to the sum, then.
    return index if index < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1]))
