"""How often a draft finds the target's token, and how soon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.distill.forcing import Text, forced_logits
from specinfer.distill.vocabulary import draft_ids
from specinfer.llm import LLM
from specinfer.models.loader import open_checkpoint

WIDTHS = (1, 2, 3, 4)
DEPTHS = (1, 2, 3, 4)
MISS = 255

Ranks = Sequence[NDArray[np.uint8]]
"""[text][token of the answer] the place of the wanted token among the draft's choices after the true text, 0
the first; MISS beyond 254, and for what the draft cannot say."""


def draft_ranks(
    target: str,
    path: Path,
    texts: Sequence[Text],
    wanted: Sequence[NDArray[np.int64]],
    target_vocab_size: int,
    device: str = "auto",
) -> list[NDArray[np.uint8]]:
    """Run a draft along texts. target: as EngineConfig.model; wanted: [text][token of the answer] target ids.
    Raises ModelError."""
    checkpoint = open_checkpoint(path)
    llm = draft_llm(target, path, device)
    vocab = checkpoint.draft_vocab
    if vocab is None:
        vocab = np.arange(min(checkpoint.config.vocab_size, target_vocab_size))
    own = draft_ids(vocab, target_vocab_size)
    is_mapped = checkpoint.draft_vocab is None or checkpoint.embeds_draft_vocab
    fed = np.maximum(own, 0) if is_mapped else np.arange(target_vocab_size)
    fits = [len(text.tokens) <= checkpoint.config.max_position for text in texts]
    read = [
        Text(fed[text.tokens], text.num_prompt) for text, is_read in zip(texts, fits, strict=True) if is_read
    ]
    logits = forced_logits(llm, read)
    return [
        places(next(logits)[:, : len(vocab)], own[ids]) if is_read else np.full(len(ids), MISS, np.uint8)
        for ids, is_read in zip(wanted, fits, strict=True)
    ]


def draft_llm(target: str, path: Path, device: str) -> LLM:
    """What runs a draft along texts: it alone, or below its target where it reads features. Raises
    ModelError."""
    model, drafts = (target, [str(path)]) if open_checkpoint(path).reads_features else (str(path), [])
    return LLM(model, drafts=drafts, device=device, max_num_seqs=1, prefix_cache=False)


def places(logits: torch.Tensor, wanted: NDArray[np.int64]) -> NDArray[np.uint8]:
    """[n] the place of column `wanted` in each row of [n, V], among equals the lower first; MISS for -1."""
    ids = torch.from_numpy(wanted).to(logits.device).unsqueeze(1)
    value = logits.gather(1, ids.clamp_min(0))
    columns = torch.arange(logits.shape[1], device=logits.device)
    better = (logits > value) | ((logits == value) & (columns < ids))
    place = better.sum(dim=1).clamp_max(MISS).masked_fill(ids.squeeze(1) < 0, MISS)
    result: NDArray[np.uint8] = place.to(torch.uint8).cpu().numpy()
    return result


def union(members: Sequence[Ranks]) -> list[NDArray[np.uint8]]:
    """A token's best place with any of several drafts: below k where one of their top k holds it."""
    return [np.minimum.reduce(list(each)) for each in zip(*members, strict=True)]


def coverage(ranks: Ranks, reads_features: bool = False) -> list[list[float]]:
    """[depth][width]: share of positions from which the next DEPTHS[depth] tokens are all among the best
    WIDTHS[width]: how often a greedy tree of that width everywhere is accepted down to that depth."""
    return [[share(ranks, depth, width) for width in WIDTHS] for depth in depths_of(reads_features)]


def depths_of(reads_features: bool) -> Sequence[int]:
    """Those that ranks say something of. A feature draft's were made with the target's rows, which it has at
    the first depth alone."""
    return DEPTHS[:1] if reads_features else DEPTHS


def share(ranks: Ranks, depth: int, width: int) -> float:
    """One entry of `coverage`; 0 where no answer is that long."""
    found = total = 0
    for row in ranks:
        if len(row) >= depth:
            windows = np.lib.stride_tricks.sliding_window_view(row < width, depth)
            found += int(windows.all(axis=1).sum())
            total += len(windows)
    return found / total if total else 0.0
