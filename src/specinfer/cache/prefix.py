"""PrefixCache: a radix tree from committed tokens to the slots that hold their K/V."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specinfer.cache.allocator import SlotAllocator, Slots


@dataclass(eq=False)
class PrefixNode:
    """An edge of the radix tree: `tokens` and their `slots`, below `parent`.

    num_users counts the open tables that end in this node or below it; a node in use is never evicted.
    is_listed: whether the cache's list of leaves has it.
    """

    tokens: tuple[int, ...]
    slots: Slots
    parent: PrefixNode | None
    children: dict[int, PrefixNode] = field(default_factory=dict)
    num_users: int = 0
    last_use: int = 0
    is_listed: bool = False

    @property
    def is_idle_leaf(self) -> bool:
        """Whether it may be evicted now."""
        return not self.children and self.num_users == 0 and self.parent is not None


class PrefixCache:
    """Owns the slots of its nodes. Holds committed tokens with written target K/V only: never a root, never
    a speculative slot. Least recently used leaves go first when slots run out."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._root = PrefixNode((), np.zeros(0, np.int64), None)
        self._clock = 0
        self._num_evictable = 0
        # A heap of (last use, serial, node): every idle leaf, and nodes that were one. A node that was used
        # since it was listed stands too early.
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        self._serial = itertools.count()
        allocator.reclaim = self.evict

    @property
    def num_slots(self) -> int:
        """Slots owned by the cache."""
        return sum(len(node.slots) for node in self.nodes())

    @property
    def num_evictable(self) -> int:
        """Slots that `evict` could free now."""
        return self._num_evictable

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node below the root, parents first."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match(self, tokens: Sequence[int]) -> tuple[Slots, PrefixNode]:
        """The slots of the longest cached prefix of `tokens`, and the node where it ends."""
        node, slots = self._root, []
        position = 0
        self._clock += 1
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                break
            common = common_length(child.tokens, tokens[position : position + len(child.tokens)])
            if common < len(child.tokens):
                child = self._split(child, common)
            child.last_use = self._clock
            slots.append(child.slots)
            position += common
            node = child
        return (np.concatenate(slots) if slots else np.zeros(0, np.int64)), node

    def insert(self, tokens: Sequence[int], slots: Slots) -> int:
        """Take over `slots` for `tokens`. Returns how many leading tokens were there before: those slots stay
        the caller's (they may be the very slots the tree holds)."""
        known, node = self.match(tokens)
        num_known = len(known)
        if num_known < len(tokens):
            rest, own = tuple(tokens[num_known:]), slots[num_known:].copy()
            if node.parent is not None and not node.children and node.num_users == 0:
                # A text that grows stays one edge.
                node.tokens, node.slots = node.tokens + rest, np.concatenate([node.slots, own])
            else:
                node.children[rest[0]] = leaf = PrefixNode(rest, own, node, last_use=self._clock)
                self._list(leaf)
            self._num_evictable += len(rest)
        return num_known

    def lock(self, node: PrefixNode) -> None:
        """Keep `node` and everything above it."""
        current: PrefixNode | None = node
        while current is not None:
            if current.num_users == 0:
                self._num_evictable -= len(current.slots)
            current.num_users += 1
            current = current.parent

    def unlock(self, node: PrefixNode) -> None:
        """Undo one lock."""
        current: PrefixNode | None = node
        while current is not None:
            current.num_users -= 1
            assert current.num_users >= 0, "a prefix was unlocked twice"
            if current.num_users == 0:
                self._num_evictable += len(current.slots)
            current = current.parent
        self._list(node)

    def evict(self, num_slots: int) -> None:
        """Free at least `num_slots` slots where unused leaves allow it, least recently used first."""
        while num_slots > 0 and self._leaves:
            last_use, _, leaf = heapq.heappop(self._leaves)
            leaf.is_listed = False
            if leaf.last_use != last_use or not leaf.is_idle_leaf:
                self._list(leaf)
                continue
            assert leaf.parent is not None
            # The tail of an edge goes first: what is left is still a prefix.
            keep = max(0, len(leaf.slots) - num_slots)
            num_slots -= len(leaf.slots) - keep
            self._num_evictable -= len(leaf.slots) - keep
            self._allocator.free(leaf.slots[keep:])
            if keep:
                leaf.tokens, leaf.slots = leaf.tokens[:keep], leaf.slots[:keep]
                self._list(leaf)
            else:
                del leaf.parent.children[leaf.tokens[0]]
                self._list(leaf.parent)

    def _list(self, node: PrefixNode) -> None:
        """Remember an idle leaf."""
        if node.is_idle_leaf and not node.is_listed:
            node.is_listed = True
            heapq.heappush(self._leaves, (node.last_use, next(self._serial), node))

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut an edge in two; the lower half stays the same object, so that locks on it hold."""
        assert node.parent is not None
        upper = PrefixNode(
            node.tokens[:at],
            node.slots[:at],
            node.parent,
            {node.tokens[at]: node},
            node.num_users,
            node.last_use,
        )
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        return upper


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(a), len(b))
    if tuple(a[:shorter]) == tuple(b[:shorter]):
        return shorter
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return shorter
