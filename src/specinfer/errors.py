"""Errors a user can meet.

    SpecinferError                something a person can act on
    |-- ConfigError (ValueError)  a setting is wrong: found before any work is done
    |-- RequestError (ValueError) one request is wrong: the engine and its other requests go on
    |-- ModelError                a checkpoint is missing, corrupt or not supported
    |-- DownloadError             something could not be fetched
    |-- OverloadError             too much waits already: try again later
    |-- DrainingError             no new requests are taken: the server is about to stop
    `-- StepError                 a step failed, and this request with it

`hint` is the way out, one line. Internal invariants are asserts, never these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches


class SpecinferError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(SpecinferError, ValueError):
    """A setting that cannot work; raised before weights are loaded where that is possible."""


class RequestError(SpecinferError, ValueError):
    """A single request that cannot be served."""


class ModelError(SpecinferError):
    """A checkpoint that is missing, corrupt, truncated or of an unsupported kind."""


class DownloadError(SpecinferError):
    """A file that could not be fetched or failed its hash."""


class OverloadError(SpecinferError):
    """A request that was not queued. retry_after: whole seconds until it may be."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message, hint=f"try again in {retry_after} s")
        self.retry_after = retry_after


class DrainingError(SpecinferError):
    """A request that came while the engine finishes its last ones."""


class StepError(SpecinferError):
    """A request that ended because its step failed."""


def check_names(given: Iterable[str], settings: type, error: type[SpecinferError], prefix: str = "") -> None:
    """Raise `error` for a name that is no field of the dataclass `settings`, with the nearest that are."""
    known = [field.name for field in fields(settings)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise error(f"{prefix}{name} is not known", hint=hint)
