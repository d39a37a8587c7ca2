"""How a request is to be served; none of it changes a token of the answer."""

from __future__ import annotations

from dataclasses import dataclass

from specinfer.errors import RequestError

MAX_SECONDS = 1e6
PATIENCE = 10.0
"""Seconds after which a request without a ttft of its own wants its first token."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """Settings of one request for the scheduler, validated on construction.

    priority: lower goes first, whatever else waits (vLLM's meaning).
    ttft: objective for the first token, in seconds after arrival. tpot: for each token after it.
    speculation: False decodes this request plainly, beside others that speculate.

    Raises RequestError naming the field.
    """

    priority: int = 0
    ttft: float | None = None
    tpot: float | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority must be an integer, got {self.priority!r}")
        for name in ("ttft", "tpot"):
            seconds = getattr(self, name)
            if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds <= MAX_SECONDS):
                raise RequestError(f"{name} must be in (0, {MAX_SECONDS:g}] seconds, got {seconds!r:.40}")
        if not isinstance(self.speculation, bool):
            raise RequestError(f"speculation must be True or False, got {self.speculation!r}")

    @property
    def patience(self) -> float:
        """Seconds after arrival when the first token is due."""
        return PATIENCE if self.ttft is None else self.ttft
