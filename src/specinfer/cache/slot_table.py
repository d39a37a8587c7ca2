"""SlotTable: one request's slots.

slots   | 0 ........ num_shared | ........ num_committed | reserved ...
owner   | the prefix cache      | this table             | this table, until commit or rollback
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specinfer.cache.allocator import SlotAllocator, Slots
from specinfer.cache.prefix import PrefixCache, PrefixNode


class SlotTable:
    """The slots of a request's committed tokens by position, and the reserved ones of the running step."""

    def __init__(self, allocator: SlotAllocator, prefix_cache: PrefixCache | None) -> None:
        self._allocator = allocator
        self._prefix_cache = prefix_cache
        self._node: PrefixNode | None = None
        self._buffer: Slots = np.zeros(64, np.int64)
        self._reserved: Slots = np.zeros(0, np.int64)
        self.num_shared = 0
        self.num_committed = 0

    @property
    def committed(self) -> Slots:
        """[num_committed], by position; a view that the next commit may move."""
        return self._buffer[: self.num_committed]

    @property
    def reserved(self) -> Slots:
        """Slots of the running step."""
        return self._reserved

    def open(self, tokens: Sequence[int]) -> int:
        """Start an empty table with the longest cached prefix of `tokens`; returns its length."""
        assert self.num_committed == 0 and self._node is None, "only an empty table can be opened"
        if self._prefix_cache is None:
            return 0
        slots, node = self._prefix_cache.match(tokens)
        self._prefix_cache.lock(node)
        self._node = node
        self._append(slots)
        self.num_shared = len(slots)
        return len(slots)

    def reserve(self, n: int) -> Slots | None:
        """n slots for this step, or None: wait or preempt."""
        assert len(self._reserved) == 0, "the last step was neither committed nor rolled back"
        slots = self._allocator.allocate(n)
        if slots is not None:
            self._reserved = slots
        return slots

    def commit(self, path: Sequence[int]) -> None:
        """Append reserved[path] in this order to the table; the rest goes back to the free list."""
        keep = np.asarray(path, np.int64)
        self._append(self._reserved[keep])
        if len(keep) < len(self._reserved):
            self._allocator.free(np.delete(self._reserved, keep))
        self._reserved = self._reserved[:0]

    def rollback(self) -> None:
        """Give every reserved slot back."""
        self.commit(())

    def publish(self, tokens: Sequence[int]) -> None:
        """Hand the committed slots, which hold `tokens`, to the prefix cache and go on using them.

        Where the cache already holds a token, its slot replaces ours (the K/V is the same to the bit).
        """
        if self._prefix_cache is None or self._node is None:
            return
        assert len(tokens) == self.num_committed
        # Nothing is evicted before the lock below; unlocked, the node can take the tokens that follow it.
        self._prefix_cache.unlock(self._node)
        num_known = self._prefix_cache.insert(tokens, self.committed)
        own_duplicates = self.committed[self.num_shared : num_known].copy()
        slots, node = self._prefix_cache.match(tokens)
        self._prefix_cache.lock(node)
        self._node = node
        self._buffer[: self.num_committed] = slots
        self.num_shared = self.num_committed
        self._allocator.free(own_duplicates)

    def release(self) -> None:
        """Give everything back: own slots to the free list, shared ones to the prefix cache."""
        self.rollback()
        self._allocator.free(self.committed[self.num_shared :])
        if self._prefix_cache is not None and self._node is not None:
            self._prefix_cache.unlock(self._node)
        self._node = None
        self.num_shared = self.num_committed = 0

    def _append(self, slots: Slots) -> None:
        end = self.num_committed + len(slots)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer)), np.int64)
            grown[: self.num_committed] = self.committed
            self._buffer = grown
        self._buffer[self.num_committed : end] = slots
        self.num_committed = end
