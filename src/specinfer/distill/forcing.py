"""A model's logits along texts that are already written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.attention import Span
from specinfer.llm import LLM
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.native import own_threads

Ints = NDArray[np.int64]
MAX_FORWARD_TOKENS = 1024
"""Unless one text alone is longer. Any engine's idle pool holds as many."""


class Text(NamedTuple):
    """tokens: [n], prompt and answer; num_prompt: tokens of the prompt."""

    tokens: Ints
    num_prompt: int

    @property
    def prompt(self) -> Ints:
        """The prompt's tokens."""
        return self.tokens[: self.num_prompt]

    @property
    def num_rows(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.num_prompt


class Forced(NamedTuple):
    """What a model made of a text, or the feature draft of an engine that has one.

    logits: [num_rows, vocabulary] that each token of the answer was chosen from. hidden: [tokens - 1, width]
    the rows that the layer asked for leaves of all tokens but the last, which is not read; None without one.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None


def forced(llm: LLM, texts: Sequence[Text], layer: int | None = None) -> Iterator[Forced]:
    """One for each text. layer: whose rows are wanted, too.

    The engine is idle meanwhile. Several texts share a forward, and neighbours with one prompt its rows:
    their answers are a tree below it.
    """
    batch: list[list[Text]] = []
    num_tokens = 0
    for text in texts:
        is_sibling = bool(batch) and np.array_equal(batch[-1][0].prompt, text.prompt)
        size = text.num_rows if is_sibling else len(text.tokens)
        if batch and num_tokens + size > MAX_FORWARD_TOKENS:
            yield from _forward(llm, batch, layer)
            batch, num_tokens, is_sibling, size = [], 0, False, len(text.tokens)
        if is_sibling:
            batch[-1].append(text)
        else:
            batch.append([text])
        num_tokens += size
    if batch:
        yield from _forward(llm, batch, layer)


def forced_logits(llm: LLM, texts: Sequence[Text]) -> Iterator[torch.Tensor]:
    """`forced`, the logits alone."""
    return (one.logits for one in forced(llm, texts))


def hidden_rows(llm: LLM, text: Text, layers: range) -> dict[int, torch.Tensor]:
    """layer -> [tokens, width]: the rows that it leaves of a text's tokens. The engine is idle meanwhile."""
    span = np.arange(-1, len(text.tokens) - 1)
    return _run(llm, [(text.tokens, span, span[:0])], layers)[1]


def _forward(llm: LLM, families: Sequence[Sequence[Text]], layer: int | None) -> Iterator[Forced]:
    trees = [family_tree(family) for family in families]
    logits, captured = _run(llm, trees, [] if layer is None else [layer])
    parts = iter(torch.split(logits, [text.num_rows for family in families for text in family]))
    start = 0
    for family, (token_ids, _, rows) in zip(families, trees, strict=True):
        ends = np.cumsum([text.num_rows for text in family])
        for answer in np.split(rows, ends[:-1]):
            hidden = None
            if layer is not None:
                path = np.concatenate([np.arange(answer[0]), answer])
                hidden = captured[layer][torch.from_numpy(start + path)]
            yield Forced(next(parts), hidden)
        start += len(token_ids)


def _run(
    llm: LLM, trees: Sequence[tuple[Ints, Ints, Ints]], layers: Collection[int] = ()
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Token ids, parents and the rows whose logits are wanted, of each tree; the layers to capture."""
    engine = llm.engine
    items, held = [], []
    try:
        for token_ids, parents, rows in trees:
            slots = engine.allocator.allocate(len(token_ids))
            assert slots is not None, "an idle engine has room for what it wrote"
            held.append(slots)
            items.append(WorkItem(Span(slots[:0], slots, parents), token_ids, rows))
        batch, parts = Batch.of(items), engine.parts
        with own_threads(parts.runner):
            if not parts.readers:
                return parts.runner.run(batch, layers)
            parts.runner.run(batch)
            return parts.readers[0].run(batch)
    finally:
        for slots in held:
            engine.allocator.free(slots)


def family_tree(family: Sequence[Text]) -> tuple[Ints, Ints, Ints]:
    """Answers to one prompt as a tree below it: token ids, parents, and the rows that each text's answer is
    chosen from, text after text. No answer's last token is read: nothing follows it."""
    root = len(family[0].prompt) - 1
    token_ids, parents, rows = [family[0].prompt], [np.arange(-1, root)], []
    start = root + 1
    for text in family:
        nodes = np.arange(start, start + text.num_rows - 1)
        token_ids.append(text.tokens[text.num_prompt : -1])
        parents.append(np.concatenate([[root], nodes])[:-1])
        rows.append(np.concatenate([[root], nodes]))
        start += len(nodes)
    return np.concatenate(token_ids), np.concatenate(parents), np.concatenate(rows)
