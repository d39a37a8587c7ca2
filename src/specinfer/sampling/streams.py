"""Streams: independent generators for the verifiers that draw with noise of their own (design.md 2)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream is for; streams of different purposes never share a number."""

    DRAFT = 0
    """A draft's draws of children; position: the drawn token's; lane: which drafter and node.

    A position that is drafted again in a later step may use its stream again: the earlier draws hung below
    nodes that were not accepted, so no verifier has looked at them.
    """
    VERIFY = 1
    """A verifier's coin, one generator per verification; position: the token's after the root, so that no
    two verifications of a request share one."""


def stream(
    seed: int, sample_index: int, position: int, purpose: Purpose, lane: int = 0
) -> np.random.Generator:
    """A generator that depends on the arguments only; any two argument lists give disjoint streams.

    seed, lane: below 2^64; sample_index, position: below 2^32. Philox4x64-10 keyed by (seed, lane), with
    purpose, position and sample index in the upper words of its counter: disjoint by construction, for 2^64
    blocks of numbers each. Raises ValueError for an argument out of range.
    """
    if not all(0 <= n < 1 << 64 for n in (seed, lane)):
        raise ValueError(f"seed and lane of a stream must be in [0, 2^64), got {seed} and {lane}")
    if not all(0 <= n < 1 << 32 for n in (sample_index, position)):
        raise ValueError(f"a stream's place must be in [0, 2^32), got {sample_index} and {position}")
    key = np.array([seed, lane], np.uint64)
    counter = np.array([0, purpose, position, sample_index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
