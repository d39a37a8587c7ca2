"""Stage 1: the target answers the prompts, in one file that survives being interrupted."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from specinfer.distill.meter import Meter
from specinfer.distill.storage import cannot_write
from specinfer.engine.request import Request
from specinfer.errors import ConfigError, RequestError
from specinfer.interrupt import Interrupted, catch_interrupt
from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams

TEMPERATURES = (0.0, 1.0)
QUEUED_PER_SEQ = 4


@dataclass(frozen=True)
class Job:
    """One answer to write. index: its number; prompt: token ids; seed: names its noise."""

    index: int
    kind: str
    temperature: float
    seed: int
    prompt: list[int]


@dataclass(frozen=True)
class Answer:
    """What the target wrote: token ids of prompt and answer, the end token included."""

    index: int
    kind: str
    temperature: float
    prompt: list[int]
    answer: list[int]


def jobs(prompts: Mapping[int, tuple[str, list[int]]], seed: int) -> list[Job]:
    """Each prompt at each temperature. prompts: number -> (kind, token ids)."""
    return [
        Job(number * len(TEMPERATURES) + i, kind, temperature, seed + number, ids)
        for number, (kind, ids) in prompts.items()
        for i, temperature in enumerate(TEMPERATURES)
    ]


def fits(llm: LLM, prompt: Sequence[int], max_tokens: int) -> bool:
    """Whether the target's context has room for a prompt and its answer."""
    try:
        llm.engine.check(prompt, SamplingParams(max_tokens=max_tokens))
    except RequestError:
        return False
    return True


class AnswerFile:
    """JSON lines, one answer each, in the order in which they were finished."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[int, Answer]:
        """index -> answer. A last line that a kill cut short is removed. Raises ConfigError."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        *lines, torn = content.split(b"\n")
        if torn:
            try:
                with self.path.open("r+b") as file:
                    file.truncate(len(content) - len(torn))
            except OSError as error:
                raise cannot_write(self.path, error) from None
        answers = {}
        for number, line in enumerate(lines, 1):
            try:
                answer = Answer(**json.loads(line))
            except (ValueError, TypeError):
                raise ConfigError(
                    f"{self.path}:{number} is not an answer",
                    hint="remove that line, or use another directory",
                ) from None
            answers[answer.index] = answer
        return answers

    def append(self, answer: Answer, file: IO[bytes]) -> None:
        """Write one line to `file`, which is unbuffered: the operating system has it when this returns.

        Raises SpecinferError.
        """
        line = json.dumps(asdict(answer), separators=(",", ":")).encode() + b"\n"
        try:
            if file.write(line) < len(line):  # what fits on a disk that fills up
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self.path, error) from None


def write_answers(
    llm: LLM,
    todo: Sequence[Job],
    file: AnswerFile,
    *,
    max_tokens: int,
    max_num_seqs: int,
    quiet: bool,
    what: str = "writing",
) -> dict[int, Answer]:
    """Answer what is missing in `file`; returns all of it. Raises Interrupted after Ctrl-C: nothing is lost.

    An answer depends on its prompt, temperature and seed alone, so a resumed run writes what an
    uninterrupted one would.
    """
    done = set(file.read())
    left = [job for job in todo if job.index not in done]
    num_done = num_before = len(done)
    num_tokens = 0
    with (
        catch_interrupt() as interrupt,
        Meter(what, len(todo), start=num_before, quiet=quiet) as meter,
        open_for_append(file.path) as sink,
        closing(finished(llm, left, max_tokens, QUEUED_PER_SEQ * max_num_seqs)) as written,
    ):
        for answer in written:
            if answer is not None:
                file.append(answer, sink)
                num_done += 1
                num_tokens += len(answer.answer)
                meter.show(num_done, f"{num_tokens / meter.seconds:.0f} tokens/s")
            if interrupt.is_set:
                raise Interrupted(
                    f"interrupted: {num_done} of {len(todo)} answers are in {file.path}; "
                    "the same command resumes"
                )
    return file.read()


def open_for_append(path: Path) -> IO[bytes]:
    """Unbuffered: what was not written does not come back when the file is closed. Raises SpecinferError."""
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from None


def finished(llm: LLM, todo: Sequence[Job], max_tokens: int, max_queued: int) -> Generator[Answer | None]:
    """Answers as they are done, None after every step. Closing the iterator aborts what is left."""
    engine = llm.engine
    waiting = list(reversed(todo))
    running: list[tuple[Job, Request]] = []
    try:
        while waiting or running:
            while waiting and len(running) < max_queued:
                job = waiting.pop()
                params = SamplingParams(temperature=job.temperature, seed=job.seed, max_tokens=max_tokens)
                running += [(job, request) for request in engine.add_request(job.prompt, params)]
            engine.step()
            done = [(job, r) for job, r in running if r.finish_reason is not None]
            running = [(job, r) for job, r in running if r.finish_reason is None]
            for job, request in done:
                tokens = [int(token) for token in request.output_token_ids]
                yield Answer(job.index, job.kind, job.temperature, job.prompt, tokens)
            yield None
    finally:
        for _, request in running:
            engine.abort(request)
