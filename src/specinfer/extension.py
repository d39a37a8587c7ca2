"""The extension in C++, `specinfer._cpu`, which an install without a compiler lacks."""

from __future__ import annotations

import importlib
from types import ModuleType


def extension() -> ModuleType | None:
    """None where it was not built."""
    try:
        return importlib.import_module("specinfer._cpu")
    except ImportError:
        return None
