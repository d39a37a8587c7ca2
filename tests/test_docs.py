"""The lists in docs/ name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`")


@pytest.mark.parametrize("page", ["models.md"])
def test_every_row_names_a_test(page: str) -> None:
    for line in (ROOT / "docs" / page).read_text().splitlines():
        is_row = line.startswith("| ") and not line.rstrip("| ").endswith("test")
        assert not is_row or NAMED.search(line), line
        for file, function, case in NAMED.findall(line):
            source = (ROOT / file).read_text()
            assert f"def {function}(" in source, line
            assert not case or f'"{case}"' in source, line
