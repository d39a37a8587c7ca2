"""SlotAllocator: who owns which slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


class SlotAllocator:
    """A free list over slots 0 .. num_slots - 1, with the pools' `filled` bits cleared on free.

    `reclaim(n)`, where set, is asked to free n more slots (the prefix cache evicts) before an allocation
    fails.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reclaim: Callable[[int], None] | None = None
        self._free: Slots = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = num_slots
        self._filled: list[NDArray[np.bool_]] = []

    @property
    def num_free(self) -> int:
        """Slots on the free list (what the prefix cache could give up not counted)."""
        return self._num_free

    @property
    def free_slots(self) -> Slots:
        """A copy of the free list, for integrity checks."""
        return self._free[: self._num_free].copy()

    def watch(self, filled: Sequence[NDArray[np.bool_]]) -> None:
        """Clear these pools' bits whenever a slot is freed."""
        self._filled.extend(filled)

    def allocate(self, n: int) -> Slots | None:
        """n slots, or None when even reclaiming cannot find them (the caller waits or preempts)."""
        if n > self._num_free and self.reclaim is not None:
            self.reclaim(n - self._num_free)
        if n > self._num_free:
            return None
        self._num_free -= n
        return self._free[self._num_free : self._num_free + n][::-1].copy()

    def free(self, slots: Slots) -> None:
        """Give slots back."""
        n = len(slots)
        assert self._num_free + n <= self.num_slots, "a slot was freed twice"
        self._free[self._num_free : self._num_free + n] = slots[::-1]
        self._num_free += n
        for filled in self._filled:
            filled[slots] = False

    def check_integrity(self, owned: Iterable[Slots]) -> None:
        """Every slot is free or in one of `owned`, exactly once."""
        num_owners = np.bincount(np.concatenate([self.free_slots, *owned]), minlength=self.num_slots)
        assert np.array_equal(num_owners, np.ones(self.num_slots)), "a slot is lost or owned twice"
