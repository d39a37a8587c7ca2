"""Filters: the tokens that survive min_p, top_k, top_p and typical_p.

A row's result is the same to the bit whatever other rows are in the batch: only exact or per-element
arithmetic, and sums of probabilities in integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from specinfer.sampling.noise import native
from specinfer.sampling_params import SamplingParams

_WEIGHT_ONE = float(1 << 40)
_FIRST_WIDTH = 256


class Filters(NamedTuple):
    """What a request keeps of its tokens; top_k 0 keeps all."""

    min_p: float
    top_k: int
    top_p: float
    typical_p: float

    @staticmethod
    def of(params: SamplingParams, num_tokens: int) -> Filters | None:
        """None where every token stays."""
        top_k = params.top_k if params.top_k < num_tokens else 0
        filters = Filters(params.min_p, top_k, params.top_p, params.typical_p)
        return None if filters == KEEP_ALL else filters

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x: [m, V] fp32, logits divided by the temperature, not written to. Returns [m, V] fp32, -inf where
        a token is dropped, or x itself."""
        if native is not None and x.device.type == "cpu":
            narrowed = x.clone(memory_format=torch.contiguous_format)
            if all(self._narrow(row) for row in narrowed):
                return _typical(narrowed, self.typical_p) if self.typical_p < 1.0 else narrowed
        if self.min_p > 0.0:
            bound = x.amax(dim=1, keepdim=True) + math.log(self.min_p)
            x = torch.where(x >= bound, x, -torch.inf)
        if self.top_p < 1.0:
            x = _keep_top(x, *_nucleus(x, self.top_k, self.top_p))
        elif self.top_k:
            bounds = x.topk(self.top_k, dim=1).values[:, -1:]
            x = _keep_top(x, bounds, torch.full_like(bounds, self.top_k, dtype=torch.int64))
        return _typical(x, self.typical_p) if self.typical_p < 1.0 else x

    def _narrow(self, row: torch.Tensor) -> bool:
        """All but typical_p by the extension, in place; whether it was sure. row: [V] fp32."""
        log_min_p = math.log(self.min_p) if self.min_p > 0.0 else -math.inf
        return bool(native.narrow(row.data_ptr(), len(row), log_min_p, self.top_k, self.top_p))


KEEP_ALL = Filters(0.0, 0, 1.0, 1.0)


def _nucleus(x: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of likeliest tokens (of the top_k, if any) whose share reaches top_p: the value of its
    last token and its size, both [m, 1]."""
    largest = x.amax(dim=1, keepdim=True)
    total = None if top_k else _weights(x, largest).sum(dim=1, keepdim=True)
    return _leading(
        x, lambda values, _: _weights(values, largest), total, share=top_p, limit=top_k or x.shape[1]
    )


def _typical(x: torch.Tensor, typical_p: float) -> torch.Tensor:
    """Keep the tokens whose -log p is nearest to the entropy, until they reach typical_p; ties all stay, as
    in transformers."""
    largest = x.amax(dim=1, keepdim=True)
    weights = _weights(x, largest)
    total = weights.sum(dim=1, keepdim=True)
    # |-log p - entropy| is |log p - its mean|, in which the normaliser cancels.
    logs = x.double() - largest.double()
    products = torch.where(weights > 0, weights * logs, 0.0).long()
    nearness = -(logs - products.sum(dim=1, keepdim=True).double() / total.double()).abs()
    bounds, _ = _leading(
        nearness, lambda _, columns: weights.gather(1, columns), total, share=typical_p, limit=x.shape[1]
    )
    return torch.where(nearness >= bounds, x, -torch.inf)


def _leading(
    keys: torch.Tensor,
    weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    total: torch.Tensor | None,
    *,
    share: float,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest columns of largest keys whose weights reach their share of the total: the last one's key and
    their number, both [m, 1].

    weigh: (keys, columns) -> weights, all [m, width]. total: [m, 1]; None is the weight of the first `limit`.
    """
    # The widest sort is ten times dearer than a narrow one, and these sets are mostly small.
    width = limit if total is None else min(_FIRST_WIDTH, limit)
    while True:
        values, columns = keys.topk(width, dim=1)
        weights = weigh(values, columns)
        sums = weights.cumsum(dim=1)
        wanted = (sums[:, -1:] if total is None else total).double() * share
        counts = ((sums - weights) < wanted).sum(dim=1, keepdim=True)
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
