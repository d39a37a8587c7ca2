"""Features: the target's last hidden rows of the tokens that lessons are read by, in a file beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from specinfer.errors import ConfigError

NAME = "features"
LARGEST = 65504.0
"""Of fp16."""
NUM_ROWS = 4096
"""That are measured."""


@dataclass(frozen=True)
class Features:
    """One text's rows within a file, which stay on the disk until they are read."""

    rows: Any
    start: int
    stop: int

    def read(self) -> NDArray[np.float16]:
        """[tokens - 1, hidden]: of every token but the last, which is not read."""
        result: NDArray[np.float16] = self.rows[self.start : self.stop]
        return result


def fp16_rows(rows: torch.Tensor) -> torch.Tensor:
    """As they are stored: clamped to what fp16 holds."""
    return rows.float().clamp(-LARGEST, LARGEST).half().cpu()


def pack_features(texts: Sequence[torch.Tensor]) -> bytes:
    """[text] fp16 rows, [tokens - 1, hidden], as one safetensors file."""
    content: bytes = safetensors.numpy.save({NAME: torch.cat(list(texts)).numpy()})
    return content


def open_features(path: Path, num_tokens: Sequence[int]) -> list[Features]:
    """One for each text. num_tokens: of each. Raises ConfigError for a file that is damaged."""
    ends = np.cumsum([n - 1 for n in num_tokens]).tolist()
    try:
        with safetensors.safe_open(str(path), "np") as file:
            rows = file.get_slice(NAME)
        if rows.get_shape()[0] != ends[-1]:
            raise ValueError(f"{rows.get_shape()[0]} rows for {ends[-1]} tokens")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path} is damaged ({error})", hint="remove it: it is made again") from None
    return [Features(rows, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def root_mean_square(texts: Iterable[Features]) -> float:
    """Of the first NUM_ROWS rows or a few more. A text's first token is where attention rests: its row is
    like no other's, and left out."""
    squares, count = 0.0, 0
    for features in texts:
        rows = features.read()[1:].astype(np.float64)
        squares, count = squares + float(np.square(rows).mean(axis=1).sum()), count + len(rows)
        if count >= NUM_ROWS:
            break
    return math.sqrt(squares / count) if squares else 1.0
