"""DraftLaw: the distributions that sampled candidates were drawn from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

DraftLaw = Mapping[tuple[int, int], NDArray[np.float64]]
"""(drafter, parent node) -> q, [vocab_size] over the target's token ids. Made and read only for
`multi_step` and `without_replacement`."""
