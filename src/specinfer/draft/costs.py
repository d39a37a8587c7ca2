"""Costs: how long a forward takes by its rows, from those that were timed."""

from __future__ import annotations

from bisect import bisect_left, insort

STEP = 0.04
"""How far one measurement moves an estimate: estimates settle at medians, which other work on the machine
hardly moves."""
SHARED = 0.75
"""Of it, what moves the estimates for other numbers of rows, too."""
NUM_FIRST = 7
"""So many measurements are kept, and their median is the estimate."""
UNSEEN = 0.25
"""What one row more costs, in parts of the average row, beyond all that was timed."""
EXACT = 16
"""Up to so many rows every number is told apart, above it those that differ by an eighth."""


class Costs:
    """Seconds by number of rows: interpolated between the numbers that were seen, never falling.

    Where a machine or a context grows slower it does so for every number of rows: a measurement moves the
    others nearly as much as its own, so that the ones that are not tried any more stay comparable. Fewer rows
    than were seen are taken to cost as much less, so that they are tried.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._first: list[list[float]] = []
        self._known: dict[int, float] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count a measurement."""
        if num_rows > EXACT:
            num_rows -= num_rows % (1 << (num_rows.bit_length() - 4))
        self._known = {}
        place = bisect_left(self._rows, num_rows)
        if place == len(self._rows) or self._rows[place] != num_rows:
            self._rows.insert(place, num_rows)
            self._seconds.insert(place, seconds)
            self._first.insert(place, [])
        if len(self._first[place]) < NUM_FIRST:
            insort(self._first[place], seconds)
            self._seconds[place] = self._first[place][(len(self._first[place]) - 1) // 2]
            return
        change = STEP if seconds > self._seconds[place] else -STEP
        shared = 1 + SHARED * change
        self._seconds = [s * shared for s in self._seconds]
        self._seconds[place] *= (1 + change) / shared

    def at(self, num_rows: int) -> float:
        """Seconds, 0 before anything was timed."""
        if num_rows not in self._known:
            self._known[num_rows] = self._estimate(num_rows)
        return self._known[num_rows]

    def _estimate(self, num_rows: int) -> float:
        if not self._rows:
            return 0.0
        right = bisect_left(self._rows, num_rows)
        if right == len(self._rows):
            return self._seconds[-1] * (1 + UNSEEN * (num_rows - self._rows[-1]) / self._rows[-1])
        # Fewer rows take no longer than more of them did.
        above = min(self._seconds[right:])
        if self._rows[right] == num_rows:
            return above
        if right == 0:
            return above * num_rows / self._rows[0]
        below = min(self._seconds[right - 1], above)
        share = (num_rows - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        return below + share * (above - below)
