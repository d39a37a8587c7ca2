"""Stage 2a: lessons, the answers with what the target thought at each of their tokens, in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from specinfer.distill.answers import Answer
from specinfer.distill.forcing import Text, forced_logits
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
    top_logprobs: [answer, k] fp16, their log-probabilities at temperature 1.
    """

    kind: str
    temperature: float
    text: Text
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float16]

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


def make_lessons(llm: LLM, answers: Sequence[Answer], directory: Path, *, quiet: bool) -> list[Lesson]:
    """The lessons of all answers, in their order; shards that `directory` holds are not made again.

    Raises Interrupted after Ctrl-C, SpecinferError where the disk is full.
    """
    paths = {
        start: directory / f"lessons-{start // ANSWERS_PER_SHARD:05}.safetensors"
        for start in range(0, len(answers), ANSWERS_PER_SHARD)
    }
    num_stored = min(len(answers), ANSWERS_PER_SHARD * sum(path.exists() for path in paths.values()))
    num_rows = 0
    with (
        catch_interrupt() as interrupt,
        Meter("scoring", len(answers), start=num_stored, quiet=quiet) as meter,
    ):
        for start, path in paths.items():
            if path.exists():
                continue
            block: list[Lesson] = []
            for lesson in score(llm, answers[start : start + ANSWERS_PER_SHARD]):
                block.append(lesson)
                num_rows += lesson.text.num_rows
                meter.show(start + len(block), f"{num_rows / meter.seconds:.0f} tokens/s")
                if interrupt.is_set:
                    raise Interrupted(
                        f"interrupted: {start} of {len(answers)} answers are scored; the same command resumes"
                    )
            write_whole(path, pack(block))
    # Only now: lessons of all shards between pieces of memory for logits would leave holes all over the heap.
    return [lesson for path in paths.values() for lesson in unpack(path)]


def score(llm: LLM, answers: Sequence[Answer]) -> Iterator[Lesson]:
    """Run the target along its answers."""
    texts = [Text(np.array(a.prompt + a.answer, np.int64), len(a.prompt)) for a in answers]
    for answer, text, logits in zip(answers, texts, forced_logits(llm, texts), strict=True):
        yield Lesson(answer.kind, answer.temperature, text, *top_rows(logits))
