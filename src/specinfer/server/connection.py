"""What is done for a client only while it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specinfer.server.errors import as_api_error

T = TypeVar("T")
STREAM_TYPE = "text/event-stream"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with stream: true its chunks as server-sent events.",
        "content": {STREAM_TYPE: {}},
    }
}
"""How OpenAPI describes a route that may stream."""


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientGone."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one per item, then [DONE]; an error in between is the last event.

    on_end: called once, however the stream ends.
    """

    media_type = STREAM_TYPE

    def __init__(self, events: AsyncGenerator[str], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in events:
                    await send(body(event))
                await send(body("[DONE]"))
            except OSError:  # the client is gone
                return
            except Exception as error:
                await end_events(send, error)
                return
            await send({"type": "http.response.body", "body": b""})


async def end_events(send: Send, error: Exception) -> None:
    """The last event of a stream that fails."""
    await send(body(as_api_error(error).json()))
    await send({"type": "http.response.body", "body": b""})


def body(event: str) -> dict[str, Any]:
    """A message with one event."""
    return {"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True}
