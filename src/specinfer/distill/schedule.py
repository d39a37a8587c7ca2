"""The learning rate: up in a line, down along a cosine."""

from __future__ import annotations

import math

WARM_UP_SHARE = 0.05
LAST_SHARE = 0.02
"""What is left of the peak at the end."""


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Of step 0 to num_steps - 1."""
    warm_up = max(1, round(WARM_UP_SHARE * num_steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - 1 - warm_up)
    return peak * (LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)
