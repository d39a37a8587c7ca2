"""Files that are there whole or not at all, and the settings that a directory belongs to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specinfer.errors import ConfigError, SpecinferError

RESUME_HINT = "nothing is lost: make room, then the same command goes on from here"


def cannot_write(path: Path, error: OSError) -> SpecinferError:
    """The one line for a disk that is full or not ours to write on."""
    return SpecinferError(f"cannot write {path}: {error.strerror or error}", hint=RESUME_HINT)


def make_directory(path: Path) -> None:
    """With its parents. Raises SpecinferError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_whole(path: Path, content: bytes) -> None:
    """Who reads `path` meanwhile, or after a kill, sees the old file or the new. Raises SpecinferError."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for people to read, too."""
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError when there is a settings file `path` and it is another run's."""
    wanted = json.loads(json.dumps(settings))
    if not path.exists():
        return
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not readable as settings ({error})", hint="use another directory"
        ) from None
    if not isinstance(found, dict) or found != wanted:
        found = found if isinstance(found, dict) else {}
        name = next(name for name in [*wanted, *found] if found.get(name) != wanted.get(name))
        raise ConfigError(
            f"{path.parent} belongs to another run: its {name} is {found.get(name)!r:.60}, "
            f"asked for is {wanted.get(name)!r:.60}",
            hint="give the same settings to go on with it, or another directory",
        )
