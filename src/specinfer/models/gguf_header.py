"""The header of a GGUF file, walked with every read checked against the file's end.

The `gguf` library's own reader takes seconds on a 49k-token vocabulary and does not notice a header that was
cut short.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Malformed(Exception):
    """The header does not parse; turned into a ModelError that names the file."""


class Strings:
    """An array of strings, left in the file: a vocabulary is read once or never, and as a list it would take
    several times the bytes that it has there."""

    def __init__(self, data: mmap.mmap, places: NDArray[np.int64]) -> None:
        """places: where each begins, with its length."""
        self._data = data
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        header = Header(self._data)
        for place in self._places:
            header.position = int(place)
            yield header.string()


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

    def value(self, kind: int) -> Any:
        """A number, a string, a list of numbers, or Strings."""
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise Malformed(f"unknown value type {kind}")
        item_kind, count = self.unpack("IQ")
        least_bytes = 8 if item_kind == _STRING else 1
        if count * least_bytes > len(self.data) - self.position:
            raise Malformed(f"an array claims {count} entries")
        if item_kind in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item_kind]}"))
        if item_kind != _STRING:
            raise Malformed(f"unknown value type {item_kind} in an array")
        places = np.empty(count, np.int64)
        for i in range(count):
            places[i] = self.position
            self.string()
        return Strings(self.data, places)
