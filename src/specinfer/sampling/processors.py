"""Processors: what a request's parameters do to logits before a token is chosen.

In vLLM's order: end tokens banned below min_tokens, temperature, min_p, then top_k and top_p (top_p among
what top_k left). A processor knows a row by its `Row`: parameters, history and path, never a tree. Those that
edit logits by history (penalties, bias, grammar) belong before the temperature.

A row's result is the same to the bit whatever other rows are in the batch: only exact or per-element
arithmetic, and probability sums in integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specinfer.sampling.row import Row

MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this one act as this one: logits divided by less leave the range of fp32."""

_WEIGHT_ONE = float(1 << 40)
_FIRST_WIDTH = 256


def process(logits: torch.Tensor, rows: Sequence[Row], token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """logits: [n, V] of any float type, never written to; rows: [n]. Returns [n, V] fp32, -inf where a token
    is excluded; it may be `logits` itself when nothing is to be done.

    token_ids: [V], the target's token id of each column, for a draft that has a subset of its vocabulary.
    Temperature 0 means no division and no filters, which can't change the likeliest token. That token (the
    lowest id of several) survives every filter; a filter that ends among equals keeps the lowest ids.
    """
    bans = [i for i, row in enumerate(rows) if bans_end_tokens(row)]
    divisors = [max(row.params.temperature, MIN_TEMPERATURE) if is_sampled(row) else 1.0 for row in rows]
    if not bans and all(divisor == 1.0 for divisor in divisors):
        out = logits.float()
    else:
        out = logits.to(torch.float32, copy=True)
        _ban_end_tokens(out, rows, bans, token_ids)
        if any(divisor != 1.0 for divisor in divisors):
            # A tensor, since division by a number may become multiplication by its reciprocal.
            out.div_(torch.tensor(divisors, dtype=torch.float32).unsqueeze(1).to(out.device))
    groups: dict[tuple[float, int, float], list[int]] = {}
    for i, row in enumerate(rows):
        params = row.params
        top_k = params.top_k if params.top_k < out.shape[1] else 0
        if is_sampled(row) and (params.min_p > 0.0 or top_k or params.top_p < 1.0):
            groups.setdefault((params.min_p, top_k, params.top_p), []).append(i)
    for filters, members in groups.items():
        if len(members) == len(rows):
            return _filter(out, *filters)
        if out is logits:
            out = out.clone()
        out[members] = _filter(out[members], *filters)
    return out


def is_sampled(row: Row) -> bool:
    """Whether chance has a part in this row."""
    return row.params.temperature > 0.0


def bans_end_tokens(row: Row) -> bool:
    """Whether the row must not end its request yet."""
    num_generated = row.position - row.num_prompt_tokens
    return bool(row.end_token_ids) and num_generated < row.params.min_tokens


def _ban_end_tokens(
    out: torch.Tensor, rows: Sequence[Row], bans: Sequence[int], token_ids: torch.Tensor | None
) -> None:
    for i in bans:
        ends = [token for token in rows[i].end_token_ids if token_ids is not None or token < out.shape[1]]
        columns = torch.tensor(ends, dtype=torch.int64, device=out.device)
        if token_ids is not None:
            columns = torch.isin(token_ids, columns).nonzero().squeeze(1)
        out[i, columns] = -torch.inf


def _filter(x: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """x: [m, V] fp32, not written to; the filters are the same for all rows, top_k 0 for none."""
    if min_p > 0.0:
        bound = x.amax(dim=1, keepdim=True) + math.log(min_p)
        x = torch.where(x >= bound, x, -torch.inf)
    if top_p < 1.0:
        return _keep_top(x, *_nucleus(x, top_k, top_p))
    if top_k:
        bounds = x.topk(top_k, dim=1).values[:, -1:]
        return _keep_top(x, bounds, torch.full_like(bounds, top_k, dtype=torch.int64))
    return x


def _nucleus(x: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of likeliest tokens (of the top_k, if any) whose share reaches top_p: the value of its
    last token and its size, both [m, 1]."""
    largest = x.amax(dim=1, keepdim=True)
    limit = top_k or x.shape[1]
    total = None if top_k else _weights(x, largest).sum(dim=1, keepdim=True)
    width = limit if top_k else min(_FIRST_WIDTH, limit)
    while True:
        # The widest sort is ten times dearer than a narrow one, and nuclei are mostly small.
        values = x.topk(width, dim=1).values
        weights = _weights(values, largest)
        sums = weights.cumsum(dim=1)
        share = (sums[:, -1:] if total is None else total).double() * top_p
        counts = ((sums - weights) < share).sum(dim=1, keepdim=True)
        if width == limit or int(counts.max()) < width:
            return values.gather(1, counts - 1), counts
        width = min(8 * width, limit)


def _weights(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """exp(x - largest) in units of 2^-40, int64: their sums are exact in any order."""
    return ((x.double() - largest.double()).exp() * _WEIGHT_ONE).long()


def _keep_top(x: torch.Tensor, bounds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Keep `counts` largest of each row, lowest ids first among equals; bounds: the smallest kept value."""
    keep = x >= bounds
    surplus = keep.sum(dim=1, keepdim=True) - counts
    if bool(surplus.any()):
        ties = x == bounds
        rank = ties.cumsum(dim=1)
        keep &= ~(ties & (rank > rank[:, -1:] - surplus))
    return torch.where(keep, x, -torch.inf)
