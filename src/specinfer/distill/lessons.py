"""Stage 2a: lessons, the answers with what the target thought at each of their tokens, in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from specinfer.distill.answers import Answer
from specinfer.distill.features import Features, fp16_rows, open_features, pack_features
from specinfer.distill.forcing import Text, forced
from specinfer.distill.meter import Meter
from specinfer.distill.prompts import Part, part_of
from specinfer.distill.storage import write_whole
from specinfer.errors import ConfigError
from specinfer.interrupt import Interrupted, catch_interrupt
from specinfer.llm import LLM

TOP_K = 16
ANSWERS_PER_SHARD = 64
ROWS_AT_ONCE = 16
"""Of logits: a few MB. Lessons between larger pieces of memory would keep these from being joined again."""


@dataclass(frozen=True)
class Lesson:
    """One answer to learn from.

    text: prompt and answer. top_ids: [answer, k] int32, the target's likeliest tokens, best first;
    top_logprobs: [answer, k] fp16, their log-probabilities at temperature 1. features: None unless asked for.
    """

    kind: str
    temperature: float
    text: Text
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float16]
    features: Features | None = None

    @property
    def part(self) -> Part:
        """Training, validation or test."""
        return part_of(self.text.prompt.tolist())


def top_rows(logits: torch.Tensor) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """[n, V] -> the TOP_K likeliest ids of each row, best first, and their log-probabilities."""
    ids, logprobs = [], []
    for rows in torch.split(logits, ROWS_AT_ONCE):
        values, best = rows.float().topk(min(TOP_K, rows.shape[1]), dim=1)
        ids.append(best.int())
        # fp16 ends at -65504; nothing below -1000 is a probability.
        logprobs.append((values - rows.float().logsumexp(dim=1, keepdim=True)).clamp_min(-1000.0).half())
    return torch.cat(ids).cpu().numpy(), torch.cat(logprobs).cpu().numpy()


def pack(lessons: Sequence[Lesson]) -> bytes:
    """Lessons as one safetensors file."""
    arrays = {
        "tokens": np.concatenate([lesson.text.tokens for lesson in lessons]).astype(np.int32),
        "lengths": np.array([len(lesson.text.tokens) for lesson in lessons], np.int32),
        "num_prompt": np.array([lesson.text.num_prompt for lesson in lessons], np.int32),
        "temperatures": np.array([lesson.temperature for lesson in lessons], np.float32),
        "top_ids": np.concatenate([lesson.top_ids for lesson in lessons]),
        "top_logprobs": np.concatenate([lesson.top_logprobs for lesson in lessons]),
    }
    content: bytes = safetensors.numpy.save(arrays, metadata={"kinds": json.dumps([x.kind for x in lessons])})
    return content


def unpack(path: Path) -> list[Lesson]:
    """The lessons of a file. Raises ConfigError for one that is damaged."""
    try:
        with safetensors.safe_open(str(path), "np") as file:
            kinds = json.loads(file.metadata()["kinds"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path} is damaged ({error})", hint="remove it: it is made again") from None
    num_rows = arrays["lengths"] - arrays["num_prompt"]
    texts = np.split(arrays["tokens"].astype(np.int64), np.cumsum(arrays["lengths"])[:-1])
    top_ids = np.split(arrays["top_ids"], np.cumsum(num_rows)[:-1])
    top_logprobs = np.split(arrays["top_logprobs"], np.cumsum(num_rows)[:-1])
    return [
        Lesson(kind, float(temperature), Text(tokens, int(num_prompt)), ids, logprobs)
        for kind, temperature, tokens, num_prompt, ids, logprobs in zip(
            kinds, arrays["temperatures"], texts, arrays["num_prompt"], top_ids, top_logprobs, strict=True
        )
    ]


class Shard:
    """Lessons of some neighbouring answers: a file of them and, where wanted, one of their features."""

    def __init__(self, directory: Path, number: int, *, has_features: bool) -> None:
        self._lessons = directory / f"lessons-{number:05}.safetensors"
        self._features = directory / f"features-{number:05}.safetensors" if has_features else None

    @property
    def is_stored(self) -> bool:
        """Whether all of it is."""
        return self._lessons.exists() and (self._features is None or self._features.exists())

    def write(self, lessons: Sequence[Lesson], rows: Sequence[torch.Tensor]) -> None:
        """rows: each text's for `pack_features`. Raises SpecinferError."""
        if self._features is not None:
            write_whole(self._features, pack_features(rows))
        if not self._lessons.exists():
            write_whole(self._lessons, pack(lessons))

    def read(self) -> list[Lesson]:
        """Raises ConfigError for a file that is damaged."""
        lessons = unpack(self._lessons)
        if self._features is None:
            return lessons
        features = open_features(self._features, [len(lesson.text.tokens) for lesson in lessons])
        return [replace(lesson, features=own) for lesson, own in zip(lessons, features, strict=True)]


def make_lessons(
    llm: LLM, answers: Sequence[Answer], directory: Path, *, layer: int | None = None, quiet: bool
) -> list[Lesson]:
    """The lessons of all answers, in their order; shards that `directory` holds are not made again.

    layer: of the target, whose rows are the features; None for lessons without. Raises Interrupted after
    Ctrl-C, SpecinferError where the disk is full.
    """
    starts = range(0, len(answers), ANSWERS_PER_SHARD)
    shards = [
        Shard(directory, start // ANSWERS_PER_SHARD, has_features=layer is not None) for start in starts
    ]
    num_stored = min(len(answers), ANSWERS_PER_SHARD * sum(shard.is_stored for shard in shards))
    num_rows = 0
    with (
        catch_interrupt() as interrupt,
        Meter("scoring", len(answers), start=num_stored, quiet=quiet) as meter,
    ):
        for start, shard in zip(starts, shards, strict=True):
            if shard.is_stored:
                continue
            block: list[Lesson] = []
            rows: list[torch.Tensor] = []
            for lesson, hidden in score(llm, answers[start : start + ANSWERS_PER_SHARD], layer):
                block.append(lesson)
                rows += [] if hidden is None else [hidden]
                num_rows += lesson.text.num_rows
                meter.show(start + len(block), f"{num_rows / meter.seconds:.0f} tokens/s")
                if interrupt.is_set:
                    raise Interrupted(
                        f"interrupted: {start} of {len(answers)} answers are scored; the same command resumes"
                    )
            shard.write(block, rows)
    # Only now: lessons of all shards between pieces of memory for logits would leave holes all over the heap.
    return [lesson for shard in shards for lesson in shard.read()]


def score(
    llm: LLM, answers: Sequence[Answer], layer: int | None = None
) -> Iterator[tuple[Lesson, torch.Tensor | None]]:
    """Run the target along its answers; beside each lesson the rows that become its features."""
    texts = [Text(np.array(a.prompt + a.answer, np.int64), len(a.prompt)) for a in answers]
    for answer, text, (logits, hidden) in zip(answers, texts, forced(llm, texts, layer), strict=True):
        lesson = Lesson(answer.kind, answer.temperature, text, *top_rows(logits))
        yield lesson, None if hidden is None else fp16_rows(hidden)
