"""The output file of a batch, which a later run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from specinfer.cli.rows import InputRow
from specinfer.errors import ConfigError

START = b'{"index": '
HINT = "name another --output, or move that file away"


class ResultFile:
    """JSON lines, one per finished row, written whole and at once.

    Construction reads what an earlier run left, and changes nothing: `done` holds the rows in it. On
    entering, a last line that a kill cut short is removed; its row counts as not done. Raises ConfigError if
    the file cannot be written or is not the output of these rows.
    """

    def __init__(self, path: Path, rows: Sequence[InputRow]) -> None:
        self.path = path
        self.done: set[int] = set()
        self._num_bytes: int | None = None
        self._file: IO[bytes] | None = None
        if path.is_dir() or not path.parent.is_dir():
            what = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
            raise ConfigError(f"cannot write {path}: {what}", hint="name a file for the results")
        if path.is_file():
            self._read(rows)

    def __enter__(self) -> ResultFile:
        try:
            self._file = self.path.open("ab")
            if self._num_bytes is not None:
                self._file.truncate(self._num_bytes)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}", hint="name another --output"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one row's result; it is with the operating system when this returns."""
        assert self._file is not None
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done.add(record["index"])

    def _read(self, rows: Sequence[InputRow]) -> None:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}", hint=HINT) from None
        *lines, torn = content.split(b"\n")
        if not START.startswith(torn[: len(START)]):
            raise ConfigError(f"{self.path} is not a file of results", hint=HINT)
        self._num_bytes = len(content) - len(torn)
        for number, line in enumerate(lines, 1):
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
                index, row_id = record["index"], record["id"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{where} is not a result", hint=HINT) from None
            if type(index) is not int or not 0 <= index < len(rows) or rows[index].id != row_id:
                raise ConfigError(f"{where} is the result of another input file", hint=HINT)
            self.done.add(index)
