"""A server in a thread of this process, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from specinfer.config import EngineConfig
from specinfer.engine.async_engine import AsyncEngine
from specinfer.engine.engine import Engine
from specinfer.engine.parts import Emission
from specinfer.server.config import ServerConfig
from specinfer.server.serve import Ready, bind, serve

DEADLINE = 60.0
MODEL = "tiny"
BYTES_PER_SLOT = 512  # of the tiny model and its draft in fp32
ENGINE_FIELDS = EngineConfig.__dataclass_fields__.keys()


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock can jump, and with it every timeout of the server."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


class Server:
    """A running server. Everything here may be called from the test's thread."""

    def __init__(self, front: AsyncEngine, config: ServerConfig) -> None:
        self.front = front
        self.config = config
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._listener = bind(config.host, config.port)
        self._loop = Loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(DEADLINE), self.failure
        self.url = f"http://127.0.0.1:{self.ready.port}"

    @property
    def engine(self) -> Engine:
        """What the front owns; look, but don't step."""
        return self.front._engine

    def client(self, **settings: Any) -> openai.OpenAI:
        """The official client, which doesn't try again."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=DEADLINE, **arguments)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE, **arguments)

    def wait_until_idle(self) -> None:
        """Until every request has ended and its slots are back."""
        self.call(self.front.wait_until_idle()).result(DEADLINE)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something holds, looked at between two turns of the server's loop."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            self.call(asyncio.sleep(0)).result(DEADLINE)

    def skip(self, seconds: float) -> None:
        """Let the clock of the server's loop jump."""

        async def jump() -> None:
            self._loop.skipped += seconds

        self.call(jump()).result(DEADLINE)

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """No step gets anywhere meanwhile: what runs ends by an abort or not at all. Yields what is set at
        the first such step."""
        stepped, pause = threading.Event(), threading.Event()

        def step() -> list[Emission]:
            stepped.set()
            pause.wait(0.001)
            return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine, "step", step)
            yield stepped

    def call(self, coroutine: Any) -> Future[Any]:
        """Run on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def drain(self) -> None:
        """What SIGTERM does; nothing, where it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.ready.stop)

    def join(self) -> None:
        """Until it has ended, which must be without a failure."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        def is_ready(ready: Ready) -> None:
            self.ready = ready
            self._ready.set()

        try:
            with self._listener, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(serve(self.front, self.config, self._listener, is_ready))
        except BaseException as error:
            self.failure = error
            self._ready.set()


Serving = Callable[..., Any]


@pytest.fixture(scope="session")
def running() -> Serving:
    """with running(front, config) as server: ... which afterwards ends without a failure or a lost slot."""

    @contextmanager
    def run(front: AsyncEngine, config: ServerConfig) -> Iterator[Server]:
        server = Server(front, config)
        try:
            yield server
        finally:
            server.drain()
            server.join()
            server.engine.check_integrity()

    return run


@pytest.fixture(scope="session")
def serving(running: Serving, tiny_model: Path, tiny_draft: Path) -> Serving:
    """with serving(slots=..., max_queue=..., **engine and server settings) as server: ..."""

    @contextmanager
    def run(*, slots: int = 8192, max_queue: int = 256, **settings: Any) -> Iterator[Server]:
        engine = {name: settings.pop(name) for name in list(settings) if name in ENGINE_FIELDS}
        tiny = {"model": str(tiny_model), "drafts": (str(tiny_draft),), "tree": "1,1", "dtype": "float32"}
        engine_config = EngineConfig(kv_memory=slots * BYTES_PER_SLOT, **(tiny | engine))
        front = AsyncEngine.build(engine_config, max_queue=max_queue)
        with running(front, ServerConfig(model_name=MODEL, port=0, **settings)) as server:
            yield server

    return run


@pytest.fixture(scope="module")
def server(serving: Serving) -> Iterator[Server]:
    """A server with default settings for a module of tests; they leave it idle."""
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The official client on `server`."""
    with server.client() as connected:
        yield connected
