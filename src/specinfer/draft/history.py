"""History: what a draft has read of a request, and the slots that keep it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specinfer.cache import KVPool, PrefixCache, SlotAllocator, SlotTable
from specinfer.draft.drafter import DraftContext
from specinfer.draft.retelling import Retelling
from specinfer.models.tokenizer import Tokenizer

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class History:
    """A request's committed tokens as a draft reads them.

    token_ids: [n], the draft's children hang below the last one. slots: [fewer than n] of the leading tokens,
    by position, in the draft's pool. to_draft: [ids] the draft's of each of token_ids', None where they are.
    """

    token_ids: Sequence[int]
    slots: Ints
    to_draft: Ints | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def tokens(self, start: int, end: int) -> Ints:
        """[end - start] draft ids of the tokens from `start` on: few of many, in most steps."""
        ids = np.array(self.token_ids[start:end], np.int64)
        return ids if self.to_draft is None else self.to_draft[ids]


class Histories(Protocol):
    """Where a draft's histories come from."""

    def open(self, contexts: Sequence[DraftContext]) -> AbstractContextManager[list[History | None]]:
        """The histories for one round of drafting; None for a request that goes on without this draft."""
        ...


class SharedHistories:
    """Of a draft whose tokens are the target's, one by one: it keeps them under the request's own slots."""

    def __init__(self, to_draft: Ints | None) -> None:
        """to_draft: [target vocabulary] draft ids, None where they are the target's."""
        self._to_draft = to_draft

    def open(self, contexts: Sequence[DraftContext]) -> AbstractContextManager[list[History | None]]:
        return nullcontext([History(c.tokens, c.slots, self._to_draft) for c in contexts])


class OwnHistories:
    """Of a draft with another tokenizer: the text retold, in slots of its own.

    Between rounds every slot is free or in a prefix cache over the draft's tokens, which takes the place of
    a table for each request: what a retelling keeps of the last one is found there, what it changed stays
    until it is evicted, and a request that ends or is preempted has nothing to give back.
    """

    def __init__(self, pool: KVPool, tokenizer: Tokenizer, own: Tokenizer, max_tokens: int) -> None:
        """tokenizer: the target's; own: the draft's. max_tokens: histories from this length on are None."""
        self._pool = pool
        self._tokenizer = tokenizer
        self._own = own
        self._max_tokens = max_tokens
        self._allocator = SlotAllocator(pool.num_slots)
        self._allocator.watch([pool.filled])
        self.prefix_cache = PrefixCache(self._allocator)

    @contextmanager
    def open(self, contexts: Sequence[DraftContext]) -> Iterator[list[History | None]]:
        told = [self._tell(context) for context in contexts]
        tables = [SlotTable(self._allocator, self.prefix_cache) for _ in contexts]
        try:
            for table, tokens in zip(tables, told, strict=True):
                table.open(tokens[:-1])  # before any is extended, which may evict what is not in use
            yield [self._extend(table, tokens) for table, tokens in zip(tables, told, strict=True)]
        finally:
            for table, tokens in zip(tables, told, strict=True):
                if self._pool.filled[table.committed].all():
                    table.publish(tokens[: table.num_committed])
                table.release()

    def check_integrity(self) -> None:
        """Between rounds, every slot is free or cached, exactly once."""
        self._allocator.check_integrity(node.slots for node in self.prefix_cache.nodes())

    def _tell(self, context: DraftContext) -> list[int]:
        """The request's text in the draft's tokens; nothing where the draft cannot follow it."""
        if self not in context.notes:
            context.notes[self] = Retelling(self._tokenizer, self._own)
        tokens: list[int] | None = context.notes[self].tell(context.tokens)
        return tokens if tokens and len(tokens) < self._max_tokens else []

    def _extend(self, table: SlotTable, tokens: list[int]) -> History | None:
        """Slots for what the cache does not hold; None where there are none."""
        missing = len(tokens) - 1 - table.num_committed
        if not tokens or table.reserve(missing) is None:
            return None
        table.commit(range(missing))
        return History(tokens, table.committed)
