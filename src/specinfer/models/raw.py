"""RawConfig: the keys of a config.json, read with their types checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specinfer.errors import ModelError

REQUIRED = object()


@dataclass(frozen=True)
class RawConfig:
    """`values` as in config.json; `source` names it in errors, which are ModelErrors."""

    values: Mapping[str, Any]
    source: str

    def read(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """A value of the right type, or a ModelError that names the key. null counts as absent."""
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise ModelError(f"{self.source}: {key} is missing", hint="is this a decoder's config.json?")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.source}: {key} should be {kind.__name__}, got {value!r}")
        return value

    def expect(self, **only: Any) -> None:
        """Refuse values other than the ones that are covered; absent and null are covered."""
        for key, value in only.items():
            got = self.values.get(key)
            if got is not None and got != value:
                raise ModelError(
                    f"{self.source}: {key} {got!r} is not supported",
                    hint=f"supported: {value!r}" if value is not None else None,
                )
