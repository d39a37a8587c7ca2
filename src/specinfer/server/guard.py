"""Guard: what every HTTP request passes before the app sees it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.server.config import ServerConfig
from specinfer.server.connection import STREAM_TYPE, ClientGone, end_events
from specinfer.server.errors import ApiError, as_api_error

logger = logging.getLogger(__name__)
OPEN_PATHS = ("/health", "/ready")
LAST_EVENT_SECONDS = 5
"""What a client gets to take the event that its time is over."""


class Guard:
    """ASGI middleware: API key, size of the body, time to send it, time to answer, and a line in the log."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._keys = ApiKeys(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        path = quote(scope["path"])  # whatever a client puts there, it stays one line of the log
        status, is_stream = 0, False

        async def watched_send(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(STREAM_TYPE)
            await send(message)

        try:
            async with asyncio.timeout(self._config.request_timeout):
                headers = Headers(scope=scope)
                if scope["path"] not in OPEN_PATHS:
                    self._keys.check(headers.get("authorization", ""))
                body = await self._read(headers, receive)
                await self._app(scope, replay(body, receive), watched_send)
        except ApiError as error:
            await error.response()(scope, receive, watched_send)
        except TimeoutError as error:
            logger.warning("%s %s took too long", scope["method"], path)
            if status == 0:
                await as_api_error(error).response()(scope, receive, watched_send)
            elif is_stream:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_EVENT_SECONDS):
                        await end_events(send, error)
        except ClientGone:
            pass
        finally:
            seconds = time.perf_counter() - start
            logger.info("%s %s %s %.3f s", scope["method"], path, status or "gone", seconds)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. One that is too large is read to its end, since a client that still sends would not
        read the answer, but not kept."""
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return b""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.read_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= self._config.max_body_bytes:
                        parts.append(part)
                    else:
                        parts.clear()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            late = f"the body did not arrive within {self._config.read_timeout:g} s"
            raise ApiError(408, late, code="timeout", headers={"Connection": "close"}) from None
        if size > self._config.max_body_bytes:
            raise ApiError(
                413, f"the body has {size} bytes, of at most {self._config.max_body_bytes}", code="too_large"
            )
        return b"".join(parts)


class ApiKeys:
    """The keys of which a request must have one; with none, every request passes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str) -> None:
        """Raise ApiError 401 unless a key comes as a bearer token; how long that takes tells nothing of how
        much of a key was right."""
        if not self._keys:
            return
        scheme, _, given = authorization.partition(" ")
        matches = [hmac.compare_digest(given.encode("utf-8", "replace"), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def replay(body: bytes, receive: Receive) -> Receive:
    """`receive` after a body that was read already."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
