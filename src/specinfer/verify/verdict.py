"""Verdict: what a verifier decided."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """path: accepted nodes from the root's child down; next_token: the one token every verification adds
    (a *bonus* token when the path ends in a leaf, else the target's correction)."""

    path: tuple[int, ...]
    next_token: int
