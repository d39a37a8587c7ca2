"""Topologies: how many children a node gets, decided before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ConfigError
from specinfer.tree.token_tree import MAX_NODES


@dataclass(frozen=True)
class Level:
    """The frontier of one depth over the whole batch; all arrays are [frontier].

    request: index into the batch; drafter: which drafter grows here; scores: product of the scores on the
    node's path, 1 at a root. is_behind: whether the drafter must first read more than a step adds to a text,
    a prompt for instance, so that the time it takes says nothing about another step's; None: nowhere.
    """

    depth: int
    request: NDArray[np.int64]
    drafter: NDArray[np.int64]
    scores: NDArray[np.float64]
    is_behind: NDArray[np.bool_] | None = None


class Topology(Protocol):
    """Decides the shape of trees, one depth at a time."""

    @property
    def max_depth(self) -> int:
        """No node lies deeper."""
        ...

    @property
    def num_nodes(self) -> int:
        """Nodes of the largest tree, root included."""
        ...

    def expand(self, level: Level) -> NDArray[np.int64]:
        """[frontier] -> number of children of each frontier node, before any draw at this depth."""
        ...


@dataclass(frozen=True)
class Expansion:
    """SpecInfer's expansion schedule <k1, ..., km>: every node at depth i gets k(i+1) children."""

    schedule: tuple[int, ...]

    def __init__(self, *schedule: int) -> None:
        object.__setattr__(self, "schedule", schedule)
        if not schedule or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in schedule):
            raise ConfigError(
                f"a tree needs one or more positive widths, got {list(schedule)}",
                hint='for example tree="3,2,1,1", or no drafts for plain decoding',
            )
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"tree {self} would have {self.num_nodes} nodes, the limit is {MAX_NODES}",
                hint="use fewer levels or smaller widths",
            )

    @property
    def max_depth(self) -> int:
        return len(self.schedule)

    @property
    def num_nodes(self) -> int:
        total = width = 1
        for k in self.schedule:
            width *= k
            total += width
            if total > 10**9:
                break
        return total

    def expand(self, level: Level) -> NDArray[np.int64]:
        k = self.schedule[level.depth] if level.depth < len(self.schedule) else 0
        return np.full(len(level.request), k, np.int64)

    def __str__(self) -> str:
        return "<" + ",".join(map(str, self.schedule)) + ">"


def Chain(num_draft_tokens: int) -> Expansion:  # noqa: N802 - reads as the topology it names
    """A tree with one child per node, `num_draft_tokens` deep."""
    if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 1:
        raise ConfigError(f"a chain needs at least 1 draft token, got {num_draft_tokens!r}")
    if num_draft_tokens >= MAX_NODES:
        raise ConfigError(f"a chain has at most {MAX_NODES - 1} draft tokens, got {num_draft_tokens}")
    return Expansion(*[1] * num_draft_tokens)


def parse_topology(text: str) -> Expansion:
    """'3,2,1,1' -> Expansion(3, 2, 1, 1). Raises ConfigError."""
    try:
        schedule = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"tree must be widths separated by commas, got {text!r}", hint='for example "3,2,1,1"'
        ) from None
    return Expansion(*schedule)
