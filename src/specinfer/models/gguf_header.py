"""The header of a GGUF file, walked with every read checked against the file's end.

The `gguf` library's own reader takes seconds on a 49k-token vocabulary and does not notice a header that was
cut short.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Malformed(Exception):
    """The header does not parse; turned into a ModelError that names the file."""


class Header:
    """Walks the header of a GGUF file. Little-endian, versions 2 and 3."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, fmt: str) -> tuple[Any, ...]:
        end = self.position + struct.calcsize("<" + fmt)
        if end > len(self.data):
            raise Malformed(f"the header ends after {len(self.data)} bytes")
        values = struct.unpack_from("<" + fmt, self.data, self.position)
        self.position = end
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.position + length
        if end > len(self.data):
            raise Malformed(f"the header ends after {len(self.data)} bytes")
        raw = self.data[self.position : end]
        self.position = end
        return raw.decode("utf-8")

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or nested:
            raise Malformed(f"unknown value type {kind}")
        item_kind, count = self.unpack("IQ")
        if count > len(self.data):
            raise Malformed(f"an array claims {count} entries")
        if item_kind in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item_kind]}"))
        return [self.value(item_kind, nested=True) for _ in range(count)]
