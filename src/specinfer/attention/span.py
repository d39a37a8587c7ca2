"""Span: the tokens that one request runs in one forward, and what each of them sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """A trunk with a tree below its last token, over a context whose K/V is written.

    context_slots: [context_len], by position. slots: [num_tokens], where this span's K/V goes.
    parents: [num_tokens] within the span, -1 below the context's last token, a parent before its child.
    A token sees the context, its ancestors and itself.
    """

    context_slots: NDArray[np.int64]
    slots: NDArray[np.int64]
    parents: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def leaf_paths(self) -> list[list[int]]:
        """Each leaf's path from the top of the span down; together they visit every token."""
        if np.array_equal(self.parents, np.arange(-1, len(self.parents) - 1)):
            return [list(range(len(self.parents)))]
        has_child = np.zeros(len(self.parents), np.bool_)
        has_child[self.parents[self.parents >= 0]] = True
        paths = []
        for leaf in np.flatnonzero(~has_child):
            path, node = [], int(leaf)
            while node >= 0:
                path.append(node)
                node = int(self.parents[node])
            paths.append(path[::-1])
        return paths

    def depths(self) -> NDArray[np.int64]:
        """[num_tokens]: tokens between the context's end and each token."""
        n = len(self.parents)
        if np.array_equal(self.parents, np.arange(-1, n - 1)):
            return np.arange(n)
        depths = np.zeros(n, np.int64)
        for i, parent in enumerate(self.parents):
            depths[i] = depths[parent] + 1 if parent >= 0 else 0
        return depths
