"""Running a server until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from types import FrameType

import uvicorn

from specinfer.engine.async_engine import AsyncEngine
from specinfer.server.app import make_app
from specinfer.server.config import ServerConfig
from specinfer.server.punctual import punctual_protocol

logger = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 5
CLOSE_SECONDS = 5
"""What connections get to take the last of their answers."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody is refused or answered on yet. Raises OSError where the port is taken."""
    with ExitStack() as on_failure:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise OSError(error.errno, f"cannot serve on {host}:{port}: {error.strerror}") from None
        on_failure.pop_all()
    return listener


@dataclass(frozen=True)
class Ready:
    """A server that answers. stop: what a signal does, for the thread of its loop."""

    port: int
    grpc_port: int | None
    stop: Callable[[], None]


class DrainingServer(uvicorn.Server):
    """uvicorn, whose first signal asks for a drain, and whose second ends it at once."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_signal: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_signal = on_signal
        self._is_asked = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._is_asked:
            super().handle_exit(sig, frame)
        self._is_asked = True
        self._on_signal()


async def serve(
    engine: AsyncEngine, config: ServerConfig, listener: socket.socket, on_ready: Callable[[Ready], None]
) -> None:
    """Serve on a bound socket, and on config.grpc_port, until SIGTERM or SIGINT; then finish what runs."""
    asked = asyncio.Event()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        rpc = None
        if config.grpc_port is not None:
            from specinfer.server.rpc import serve_grpc

            rpc = await stack.enter_async_context(serve_grpc(engine, config))
        ready = Ready(listener.getsockname()[1], rpc.port if rpc is not None else None, asked.set)
        http = DrainingServer(
            uvicorn.Config(
                make_app(engine, config),
                http=punctual_protocol(config.read_timeout),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            ),
            on_ready=lambda: on_ready(ready),
            on_signal=asked.set,
        )
        serving = asyncio.create_task(http.serve([listener]))
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if rpc is not None:
            await rpc.drain()
        draining = asyncio.create_task(drain(engine, config.drain_timeout))
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()  # where a second signal has ended HTTP, gRPC does not wait either
        http.should_exit = True
        await serving


async def drain(engine: AsyncEngine, seconds: float) -> None:
    """Refuse what is new, let what runs finish."""
    engine.drain()
    logger.info("draining: %d requests are left", engine.num_open)
    try:
        await asyncio.wait_for(engine.wait_until_idle(), seconds)
    except TimeoutError:
        logger.warning("%d requests did not finish within %g s", engine.num_open, seconds)
