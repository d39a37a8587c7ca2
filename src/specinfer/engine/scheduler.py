"""Scheduler: which requests run in a step, and how many of their tokens."""

from __future__ import annotations

import math
import time
from bisect import insort
from typing import NamedTuple

from specinfer.cache import PrefixCache, SlotAllocator, SlotTable
from specinfer.engine.request import Request, Status

LATE_SHARE = 8
"""The part of a step's prompt tokens that is left while decoding is late."""


class Scheduled(NamedTuple):
    """trunk_len known tokens of `request` run in this step; with `max_nodes` > 1 a tree may follow them.

    A trunk that reaches the last token is decoded (it has a verdict); a shorter one is prefill.
    """

    request: Request
    trunk_len: int
    max_nodes: int

    @property
    def is_decoded(self) -> bool:
        return self.trunk_len == self.request.num_uncomputed


Urgency = tuple[int, float, float]


def urgency(request: Request) -> Urgency:
    """Who goes first: by priority, then by when the first token is due. It never changes, so that no two
    requests preempt each other in turn, and whoever waits becomes the most urgent in the end."""
    return request.service.priority, request.arrival + request.service.patience, request.arrival


def slack(request: Request, now: float) -> float:
    """Seconds until the request misses its objective; below zero it has."""
    if request.first_token_time is None:
        return request.arrival + request.service.patience - now
    if request.service.tpot is None:
        return math.inf
    return request.first_token_time + request.service.tpot * request.num_output_tokens - now


class Scheduler:
    """The most urgent first, which is first come, first served where requests ask for nothing else.

    Known tokens come first: trees share only slots that nothing else needs, so speculation never preempts;
    when known tokens do not fit, the least urgent request (the youngest of its kind) is preempted and
    computed again later. The most urgent always fits (the engine refuses others), so there is no deadlock.

    waiting, running: by urgency.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        prefix_cache: PrefixCache | None,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
    ) -> None:
        self._allocator = allocator
        self._prefix_cache = prefix_cache
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=urgency)

    def schedule(self, max_tree_nodes: int, max_forced_tokens: int = 0) -> list[Scheduled]:
        """The next step's work. max_tree_nodes: the largest tree wanted, root included; max_forced_tokens:
        more nodes where a request has a grammar."""
        self._admit()
        trunks = self._trunks()
        while sum(trunks) > self._num_available():
            self._preempt(self.running[-1])
            trunks = self._trunks()
        spare = self._num_available() - sum(trunks)
        # A tree hangs below a root that runs alone: the step after a prefill is the first with one.
        has_tree = [r.num_uncomputed == 1 and r.service.speculation for r in self.running]
        num_trees = sum(has_tree)
        result = []
        for request, trunk, is_tree in zip(self.running, trunks, has_tree, strict=True):
            nodes = 0
            if is_tree:
                wanted = max_tree_nodes - 1 + (max_forced_tokens if request.params.form else 0)
                nodes = min(wanted, spare // num_trees)
                spare -= nodes
                num_trees -= 1
            if trunk:
                result.append(Scheduled(request, trunk, 1 + nodes))
        return result

    def finish(self, request: Request) -> None:
        """Give a finished request's slots back; its K/V stays in the prefix cache while there is room."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._close(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _admit(self) -> None:
        """Start waiting requests while there are slots for their whole prompts; nobody overtakes who waits
        for room."""
        for request in self.waiting[:]:
            if len(self.running) == self._max_num_seqs:
                return
            if self._prefix_cache is not None and self._is_being_computed(request):
                continue  # the same prompt is on its way into the cache
            table = SlotTable(self._allocator, self._prefix_cache)
            cached = table.open(request.tokens[: request.num_reusable])
            promised = sum(r.num_uncomputed for r in self.running)
            if len(request.tokens) - cached + promised > self._num_available():
                table.release()
                return
            self.waiting.remove(request)
            request.table = table
            request.status = Status.RUNNING
            if request.start_time is None:
                request.start_time = time.perf_counter()
            if request.num_output_tokens == 0:
                request.num_cached_tokens = cached
            insort(self.running, request, key=urgency)

    def _is_being_computed(self, request: Request) -> bool:
        return any(
            r.num_output_tokens == 0 and r.num_uncomputed > 1 and r.tokens == request.tokens
            for r in self.running
        )

    def _trunks(self) -> list[int]:
        """[running] trunk lengths: roots first, then prefill within the step's budget."""
        budget = self._prefill_budget()
        trunks = []
        for request in self.running:
            if request.num_uncomputed == 1:
                trunks.append(1)
            else:
                trunks.append(min(request.num_uncomputed, budget))
                budget -= trunks[-1]
        return trunks

    def _prefill_budget(self) -> int:
        """Prompt tokens of this step: fewer, never none, while the least slack is that of a request whose
        tokens are late, since prefill is what makes a step long."""
        now = time.perf_counter()
        least = min(self.running, key=lambda r: slack(r, now), default=None)
        is_late = least is not None and least.first_token_time is not None and slack(least, now) < 0
        return max(1, self._max_step_tokens // LATE_SHARE) if is_late else self._max_step_tokens

    def _num_available(self) -> int:
        cached = self._prefix_cache.num_evictable if self._prefix_cache is not None else 0
        return self._allocator.num_free + cached

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self._close(request)
        request.status = Status.WAITING
        self.add(request)

    def _close(self, request: Request) -> None:
        assert request.table is not None
        request.table.rollback()
        request.table.publish(request.tokens[: request.table.num_committed])
        request.table.release()
        request.table = None
