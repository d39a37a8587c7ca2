"""Slot tables, allocator and prefix cache as one state machine: no slot is ever lost or owned twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specinfer.cache import PrefixCache, SlotAllocator, SlotTable

NUM_SLOTS = 40


class Slots(RuleBasedStateMachine):
    """Requests over a tiny alphabet, so that prefixes meet, split and are evicted all the time.

    `written[slot]` stands for the slot's K/V: the token sequence that was computed into it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[SlotTable, list[int]]] = []
        self.written: dict[int, tuple[int, ...]] = {}

    @initialize(with_cache=st.booleans())
    def start(self, with_cache: bool) -> None:
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.filled = np.zeros(NUM_SLOTS, np.bool_)
        self.allocator.watch([self.filled])
        self.cache = PrefixCache(self.allocator) if with_cache else None

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12))
    def open(self, tokens: list[int]) -> None:
        table = SlotTable(self.allocator, self.cache)
        num_cached = table.open(tokens)
        assert num_cached == table.num_committed <= len(tokens)
        self.tables.append((table, tokens[:num_cached]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Reserve for a tree, write all of it, keep one path."""
        table, tokens = data.draw(st.sampled_from(self.tables))
        n = data.draw(st.integers(1, 8))
        slots = table.reserve(n)
        if slots is None:
            evictable = self.cache.num_evictable if self.cache else 0
            assert n > self.allocator.num_free + evictable
            return
        assert not self.filled[slots].any(), "a freed slot still counts as filled"
        path = data.draw(st.lists(st.integers(0, n - 1), unique=True).map(sorted))
        new = [data.draw(st.integers(0, 1)) for _ in path]
        for node in range(n):
            self.written[int(slots[node])] = (-1,)  # whatever a rejected branch left there
        for i, node in enumerate(path):
            self.written[int(slots[node])] = (*tokens, *new[: i + 1])
        table.commit(path)
        self.filled[table.committed[len(tokens) :]] = True
        tokens.extend(new)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        table.publish(tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), first_publish=st.booleans())
    def close(self, data: st.DataObject, first_publish: bool) -> None:
        entry = data.draw(st.sampled_from(self.tables))
        if first_publish:
            entry[0].publish(entry[1])
        entry[0].release()
        self.tables.remove(entry)

    @invariant()
    def every_slot_once(self) -> None:
        if not hasattr(self, "allocator"):
            return
        owned = self.allocator.free_slots.tolist()
        for table, _ in self.tables:
            owned += table.committed[table.num_shared :].tolist()
        if self.cache:
            owned += [s for node in self.cache.nodes() for s in node.slots.tolist()]
            unused = sum(len(node.slots) for node in self.cache.nodes() if node.num_users == 0)
            assert self.cache.num_evictable == unused
        assert sorted(owned) == list(range(NUM_SLOTS))

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table, tokens in self.tables:
            assert table.num_committed == len(tokens)
            for i, slot in enumerate(table.committed):
                assert self.written[int(slot)] == tuple(tokens[: i + 1])
                assert self.filled[slot]


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12))
@settings(max_examples=60)
def test_prefix_cache_finds_the_longest_prefix(sequences: list[list[int]]) -> None:
    allocator = SlotAllocator(200)
    cache = PrefixCache(allocator)
    inserted: list[list[int]] = []
    for sequence in sequences:
        slots, _ = cache.match(sequence)
        longest = max((common(sequence, other) for other in inserted), default=0)
        assert len(slots) == longest
        fresh = allocator.allocate(len(sequence))
        assert fresh is not None
        known = cache.insert(sequence, fresh)
        allocator.free(fresh[:known])
        inserted.append(sequence)
    assert cache.num_slots == cache.num_evictable == 200 - allocator.num_free
    cache.evict(200)
    assert allocator.num_free == 200


def test_a_text_that_grows_stays_one_edge() -> None:
    """Published after every step, it costs no longer walk; one that others use, or leave, is not extended."""
    allocator = SlotAllocator(60)
    cache = PrefixCache(allocator)
    other = SlotTable(allocator, cache)
    for end in range(3, 30, 3):
        table = SlotTable(allocator, cache)
        table.open(range(end))
        missing = end - table.num_committed
        assert missing == 3
        assert table.reserve(missing) is not None
        table.commit(range(missing))
        table.publish(range(end))
        table.release()
        if end == 15:
            other.open(range(end))
    assert sorted(len(node.slots) for node in cache.nodes()) == [12, 15]
    assert (cache.num_slots, cache.num_evictable) == (27, 12)
    other.release()
    assert cache.num_evictable == 27


def test_the_least_recently_used_leaf_goes_first_and_its_tail_before_its_head() -> None:
    allocator = SlotAllocator(30)
    cache = PrefixCache(allocator)
    for text in ([0, 1, 2], [0, 1, 3], [4, 5], [6, 7]):
        slots = allocator.allocate(len(text))
        assert slots is not None
        allocator.free(slots[: cache.insert(text, slots)])
    cache.match([4, 5])
    cache.match([0, 1, 2])
    for num_slots, left in (
        (0, [(0, 1), (2,), (3,), (4, 5), (6, 7)]),
        (1, [(0, 1), (2,), (4, 5), (6, 7)]),
        (1, [(0, 1), (2,), (4, 5), (6,)]),
        (2, [(0, 1), (2,), (4,)]),
        (2, [(0, 1)]),
        (1, [(0,)]),
    ):
        cache.evict(num_slots)
        assert sorted(node.tokens for node in cache.nodes()) == left
    assert allocator.num_free == 29


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
