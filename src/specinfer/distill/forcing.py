"""A model's logits along texts that are already written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.attention import Span
from specinfer.llm import LLM
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.native import own_threads

ROWS_PER_FORWARD = 512


class Text(NamedTuple):
    """tokens: [n], prompt and answer; num_prompt: tokens of the prompt."""

    tokens: NDArray[np.int64]
    num_prompt: int

    @property
    def num_rows(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.num_prompt


def forced_logits(llm: LLM, texts: Sequence[Text]) -> Iterator[torch.Tensor]:
    """[num_rows, vocabulary] for each text: the logits that each token of its answer was chosen from.

    The engine is idle meanwhile; several texts share a forward.
    """
    start = 0
    while start < len(texts):
        end, num_rows = start + 1, len(texts[start].tokens)
        while end < len(texts) and num_rows + len(texts[end].tokens) <= ROWS_PER_FORWARD:
            num_rows += len(texts[end].tokens)
            end += 1
        yield from _forward(llm, texts[start:end])
        start = end


def _forward(llm: LLM, texts: Sequence[Text]) -> Sequence[torch.Tensor]:
    engine = llm.engine
    items, held = [], []
    try:
        for text in texts:
            n = len(text.tokens)
            slots = engine.allocator.allocate(n)
            assert slots is not None, "an idle engine has room for what it wrote"
            held.append(slots)
            span = Span(slots[:0], slots, np.arange(-1, n - 1))
            items.append(WorkItem(span, text.tokens, np.arange(text.num_prompt - 1, n - 1)))
        with own_threads(engine.parts.runner):
            logits, _ = engine.parts.runner.run(Batch.of(items))
    finally:
        for slots in held:
            engine.allocator.free(slots)
    return torch.split(logits, [text.num_rows for text in texts])
