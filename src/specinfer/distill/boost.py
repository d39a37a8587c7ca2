"""Collective tuning (SpecInfer, section 3): each member learns most from what those before it miss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specinfer.attention import Span
from specinfer.distill.hits import Ranks, depths_of, draft_llm, share, union
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.native import own_threads

FOUND_WEIGHT = 0.1
"""What a token still counts for that a member before finds: the next one must go on speaking the language."""
NUM_TIMED = 50


def boost_weights(members: Sequence[Ranks], num_rows: Sequence[int]) -> list[NDArray[np.float32]]:
    """[text][token] weights of the next member's lessons: 1 where no member's first choice is right (or there
    is none yet), FOUND_WEIGHT elsewhere. num_rows: tokens of each text's answer."""
    if not members:
        return [np.ones(n, np.float32) for n in num_rows]
    return [np.where(row == 0, FOUND_WEIGHT, 1.0).astype(np.float32) for row in union(members)]


def compare(
    members: Sequence[Ranks], larger: Ranks, costs: Sequence[float], reads_features: bool = False
) -> dict[str, Any]:
    """What each member adds, against one draft of the same size that may name as many candidates.

    costs: milliseconds of a forward, of each member and of the larger draft. Every row has the shares of
    places where a candidate is right at every depth down to each of `depths_of`.
    """
    n, depths = len(members), depths_of(reads_features)
    rows: list[dict[str, Any]] = [
        {
            "name": "member 1" if m == 1 else f"members 1 to {m}",
            "milliseconds": sum(costs[:m]),
            "depths": [share(union(members[:m]), depth, 1) for depth in depths],
        }
        for m in range(1, n + 1)
    ]
    for width in (1, n):
        shares = [share(larger, depth, width) for depth in depths]
        rows.append({"name": f"one larger, its best {width}", "milliseconds": costs[-1], "depths": shares})
    together, alone = rows[n - 1]["depths"][0], rows[-1]["depths"][0]
    winner = "the members win" if together > alone else "one larger draft wins"
    verdict = (
        f"With {n} candidates at every place, {n} members find {together:.3f} of the next tokens, "
        f"one draft of their size finds {alone:.3f}: {winner}."
    )
    return {"rows": rows, "verdict": verdict}


def forward_milliseconds(target: str, draft: Path, device: str) -> float:
    """Median time of a forward of one token with warm caches: the least that a draft costs per depth."""
    parts = draft_llm(target, draft, device).engine.parts
    runner = parts.readers[0] if parts.readers else parts.runner
    span = Span(np.zeros(0, np.int64), np.zeros(1, np.int64), np.full(1, -1, np.int64))
    batch = Batch.of([WorkItem(span, np.zeros(1, np.int64), np.zeros(1, np.int64))])
    seconds = []
    with own_threads(parts.runner):
        for _ in range(NUM_TIMED):
            start = time.perf_counter()
            runner.run(batch)[0].sum().item()  # a GPU is done when its result is here
            seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)
