"""Coin: the only randomness a stochastic verifier uses, so that a test can enumerate it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Coin(Protocol):
    """accept(ratio) is True with probability min(1, ratio), never for ratio 0; draw(weights) is index i
    with probability weights[i] / sum(weights)."""

    def accept(self, ratio: float) -> bool: ...

    def draw(self, weights: NDArray[np.float64]) -> int: ...


class RandomCoin:
    """A coin tossed by a generator of its own, never one shared with a draft's draws, and made for its first
    toss."""

    def __init__(self, make: Callable[[], np.random.Generator]) -> None:
        self._make = make

    @cached_property
    def _generator(self) -> np.random.Generator:
        return self._make()

    def accept(self, ratio: float) -> bool:
        return bool(self._generator.random() < ratio)

    def draw(self, weights: NDArray[np.float64]) -> int:
        return draw(self._generator.random(), weights)


def draw(u: float, weights: NDArray[np.float64]) -> int:
    """The index whose share of the weights covers u in [0, 1); never one of weight 0."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # Rounding can put u * total on the total itself: fall back to the last token with weight.
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
