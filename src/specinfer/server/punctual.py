"""PunctualProtocol: uvicorn's HTTP, on connections that must say what they want."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def punctual_protocol(seconds: float) -> type[asyncio.Protocol]:
    """A protocol that closes a connection whose client takes longer to send a request's head, or sends none.

    uvicorn has no such limit: it waits for ever, and every waiting connection holds a file. Between two
    requests its keep-alive timeout counts; from the first byte of the next one, this. Always on h11, which
    limits the size of a head; the parser that uvicorn takes where it is installed, httptools, does not.
    """

    class PunctualProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Run the timer while the head of a request is awaited; no byte sets it back."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return PunctualProtocol
