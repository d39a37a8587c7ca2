"""AsyncEngine: the engine on a thread of its own, reached from an event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from specinfer.config import EngineConfig
from specinfer.engine.build import build_engine
from specinfer.engine.chunk import Cursor
from specinfer.engine.engine import Engine
from specinfer.engine.parts import Emission
from specinfer.engine.request import Request
from specinfer.errors import DrainingError, OverloadError, RequestError, StepError
from specinfer.metrics import ServingMetrics
from specinfer.models.tokenizer import Tokenizer
from specinfer.outputs import StreamChunk
from specinfer.sampling_params import SamplingParams
from specinfer.service import Service
from specinfer.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)
T = TypeVar("T")
NUM_WORKERS = 2
MAX_RETRY_SECONDS = 60


class Generation:
    """One call's requests, prompt by prompt, and the chunks of all of them as they come."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.num_output_tokens = 0
        """Of the chunks that were taken."""
        self._chunks: deque[tuple[int, StreamChunk]] = deque()
        self._error: StepError | None = None
        self._num_open = len(requests)
        self._changed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """(index in `requests`, chunk) until all are finished. Raises StepError."""
        while self._chunks or self._num_open:
            if not self._chunks:
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                await self._changed.wait()
                continue
            index, chunk = self._chunks.popleft()
            self.num_output_tokens += len(chunk.token_ids)
            yield index, chunk
            if self._chunks:
                await asyncio.sleep(0)  # a backlog, which may grow all the time, lets others in

    def deliver(self, index: int, event: StreamChunk | StepError) -> bool:
        """Take what a step made of a request; returns whether that was its end."""
        is_end = isinstance(event, StepError) or event.output is not None
        if isinstance(event, StepError):
            self._error = event
        else:
            self._chunks.append((index, event))
            self._num_open -= is_end
        self._changed.set()
        return is_end


class Subscription:
    """Where a request's chunks go, and what went there. Belongs to the engine's thread."""

    def __init__(self, generation: Generation, index: int) -> None:
        self.generation = generation
        self.index = index
        self.cursor = Cursor()
        self.last_emission: float | None = None


Event = tuple[Generation, int, StreamChunk | StepError]


class AsyncEngine:
    """Owns an engine and the thread that steps it.

    `async with` starts and ends the thread; all calls then come from that event loop, and only the thread
    touches the engine. A step that raises fails the requests that ran in it; the others go on.

    max_queue: requests that may wait beside the max_num_seqs that run.
    """

    def __init__(self, engine: Engine, *, max_num_seqs: int, max_queue: int) -> None:
        self.metrics = ServingMetrics()
        self.is_draining = False
        self.num_open = 0
        """Requests that wait or run."""
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._capacity = max_num_seqs + max_queue
        self._failure: str | None = None
        self._loop: asyncio.AbstractEventLoop
        self._all_done = asyncio.Event()
        self._all_done.set()
        self._workers = ThreadPoolExecutor(NUM_WORKERS, "specinfer-worker")
        self._subscriptions: dict[Request, Subscription] = {}
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="specinfer-engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Abort what still runs and end the thread."""
        self.drain()
        self._post(lambda: self._abort(list(self._subscriptions)))
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        await self.in_worker(self._thread.join)
        self._workers.shutdown()

    @staticmethod
    def build(config: EngineConfig, *, max_queue: int) -> AsyncEngine:
        """Load the models of `config`. Raises ConfigError, ModelError or DownloadError."""
        return AsyncEngine(build_engine(config), max_num_seqs=config.max_num_seqs, max_queue=max_queue)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's. Raises RequestError where the checkpoint has none."""
        if self._engine.tokenizer is None:
            raise RequestError("the model has no tokenizer", hint="give prompts as token ids")
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self._engine.vocab_size

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output together."""
        return min(self._engine.max_model_len, self._engine.allocator.num_slots)

    @property
    def failure(self) -> str | None:
        """Why this engine can't go on, if it can't."""
        return self._failure

    async def in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that takes time, such as tokenising, beside the loop and the steps."""
        return await self._loop.run_in_executor(self._workers, function, *arguments)

    def check_room(self, num_new: int = 1) -> None:
        """Raise OverloadError, DrainingError or StepError unless so many new requests would be taken now."""
        if self.failure is not None:
            raise StepError(f"the engine has stopped: {self.failure}")
        if self.is_draining:
            self.metrics.refused["draining"] += 1
            raise DrainingError("the server is shutting down", hint="send the request to another server")
        if self.num_open + num_new > self._capacity:
            self.metrics.refused["overload"] += 1
            rounds = self.num_open / self._max_num_seqs
            seconds = min(MAX_RETRY_SECONDS, math.ceil(rounds * self.metrics.e2e.mean))
            raise OverloadError(
                f"{self.num_open} requests run or wait, of at most {self._capacity}", max(1, seconds)
            )

    def check_form(self, form: StructuredOutputsParams) -> None:
        """Raise RequestError unless outputs can have this form; takes time, for a worker."""
        self._engine.check_form(form)

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, service: Service | None = None
    ) -> Generation:
        """Queue params.n requests for each prompt, all or none. The caller iterates over them, and aborts
        what it no longer wants.

        Raises RequestError for what can never run, OverloadError, DrainingError, or StepError when the engine
        is broken.
        """
        num_new = len(prompts) * params.n
        if num_new > self._capacity:
            raise RequestError(
                f"{len(prompts)} prompts of {params.n} samples are {num_new} requests: at most "
                f"{self._capacity} can run and wait",
                hint="send fewer at once",
            )
        self.check_room(num_new)

        def make() -> list[Request]:
            return [r for prompt in prompts for r in self._engine.new_requests(prompt, params, service)]

        try:
            requests = await self.in_worker(make)
        except RequestError:
            self.metrics.refused["invalid"] += 1
            raise
        self.check_room(num_new)
        generation = Generation(requests)
        if not self._post(lambda: self._add(generation)):
            raise StepError(f"the engine has stopped: {self.failure}")
        self.num_open += num_new
        self._all_done.clear()
        return generation

    def abort(self, generation: Generation) -> None:
        """End what is left of it before the next step; finished requests are left alone."""
        self._post(lambda: self._abort(generation.requests))

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Until no request waits or runs."""
        await self._all_done.wait()

    def check_integrity(self) -> None:
        """Every slot is free, cached or owned once. Only while idle."""
        self._engine.check_integrity()

    def gauges(self) -> dict[str, float]:
        """How things stand now, by name; read beside the running thread, so a step may lie between two."""
        scheduler, allocator = self._engine.parts.scheduler, self._engine.allocator
        cache = self._engine.prefix_cache
        num_free = allocator.num_free + (cache.num_evictable if cache is not None else 0)
        num_running = len(scheduler.running)
        timer = self._engine.parts.timer
        return {
            "num_running": num_running,
            "num_waiting": max(0, self.num_open - num_running),
            "cache_usage": 1 - num_free / allocator.num_slots,
            "num_preemptions": scheduler.num_preemptions,
            "num_steps": timer.num_steps,
            "step_seconds": timer.total,
            **{f"{phase}_seconds": seconds for phase, seconds in timer.seconds.items()},
        }

    def _post(self, command: Callable[[], None]) -> bool:
        """Leave a command for the thread; False when it takes none any more."""
        with self._wake:
            if self._failure is None:
                self._inbox.append(command)
                self._wake.notify()
            return self._failure is None

    def _deliver(self, events: Sequence[Event]) -> None:
        """On the loop."""
        for generation, index, event in events:
            self.num_open -= generation.deliver(index, event)
        if self.num_open == 0:
            self._all_done.set()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException as error:
            logger.critical("the engine stops", exc_info=True)
            self._stop(f"{type(error).__name__}: {error}")

    def _serve(self) -> bool:
        """Take the commands and run one step, when there is something to do; returns whether to go on."""
        with self._wake:
            while not (self._inbox or self._engine.has_work or self._is_closed):
                self._wake.wait()
            commands, self._inbox = self._inbox, []
            if self._is_closed and not (commands or self._engine.has_work):
                return False
        for command in commands:
            command()
        if self._engine.has_work:
            self._step()
        if not self._engine.has_work:
            self._engine.check_integrity()
        return True

    def _stop(self, reason: str) -> None:
        """The engine can't be trusted any more: everything that is open fails."""
        with self._wake:
            self._failure = reason
            commands, self._inbox = self._inbox, []
        for command in commands:
            with suppress(Exception):  # an abort may meet what broke the engine
                command()
        failure = StepError(f"the engine has stopped: {reason}")
        self._send([(s.generation, s.index, failure) for s in self._subscriptions.values()])

    def _add(self, generation: Generation) -> None:
        for index, request in enumerate(generation.requests):
            self._subscriptions[request] = Subscription(generation, index)
            self._engine.queue(request)

    def _abort(self, requests: Sequence[Request]) -> None:
        events = []
        for request in requests:
            if request in self._subscriptions:
                self._engine.abort(request)
                events.append(self._event(request))
        self._send(events)

    def _step(self) -> None:
        try:
            emissions = self._engine.step()
        except Exception as error:
            self._fail(error)
            return
        events = []
        for emission in emissions:
            self._observe(emission)
            events.append(self._event(emission.request))
        self._send(events)

    def _fail(self, error: Exception) -> None:
        """A step raised: its requests end with it. Those that it finished before are answered."""
        logger.exception("a step failed, and its requests with it")
        self.metrics.num_failed_steps += 1
        scheduler = self._engine.parts.scheduler
        failed = list(scheduler.running) or list(scheduler.waiting)
        events = [self._event(r) for r in list(self._subscriptions) if r.finish_reason is not None]
        for request in failed:
            self._engine.abort(request)
            subscription = self._subscriptions.pop(request)
            failure = StepError(f"the step that computed this request failed: {type(error).__name__}")
            events.append((subscription.generation, subscription.index, failure))
            self.metrics.finished["error"] += 1
        self._send(events)

    def _event(self, request: Request) -> Event:
        subscription = self._subscriptions[request]
        chunk = subscription.cursor.chunk(request)
        if chunk.output is not None:
            del self._subscriptions[request]
            seconds = time.perf_counter() - request.arrival
            self.metrics.observe_finished(chunk.output, request.num_prompt_tokens, seconds, request.service)
        return subscription.generation, subscription.index, chunk

    def _observe(self, emission: Emission) -> None:
        now = time.perf_counter()
        request = emission.request
        subscription = self._subscriptions[request]
        if subscription.last_emission is not None:
            self.metrics.itl.observe(now - subscription.last_emission)
        else:
            assert request.start_time is not None and request.first_token_time is not None
            self.metrics.queue.observe(request.start_time - request.arrival)
            self.metrics.ttft.observe(request.first_token_time - request.arrival)
        subscription.last_emission = now
        self.metrics.num_output_tokens += len(emission.token_ids)
        if emission.proposal.tree.num_draft_tokens:
            self.metrics.observe_draft(emission.proposal.tree.num_draft_tokens, emission.num_accepted)

    def _send(self, events: Sequence[Event]) -> None:
        if events:
            self._loop.call_soon_threadsafe(self._deliver, events)
