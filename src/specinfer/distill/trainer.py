"""Stage 2b: training a student, from where an earlier run was interrupted."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.distill.batches import MicroBatch, micro_batch, micro_batches, steps, text_lengths
from specinfer.distill.hits import WIDTHS, places
from specinfer.distill.lessons import Lesson
from specinfer.distill.loss import top_k_loss
from specinfer.distill.meter import Meter
from specinfer.distill.schedule import learning_rate
from specinfer.distill.storage import write_whole
from specinfer.distill.student import Student
from specinfer.errors import ConfigError
from specinfer.interrupt import Interrupted, catch_interrupt

NUM_EVALUATIONS = 20
PATIENCE = 8
"""Evaluations without a better one, after which training ends. Fewer, and a falling rate could still help."""
MAX_VALIDATION_ROWS = 20_000
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0
SECONDS_BETWEEN_CHECKPOINTS = 120.0


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long and how fast. batch_tokens: tokens of one optimizer step, prompts included."""

    num_epochs: int
    learning_rate: float
    batch_tokens: int
    seed: int


class Trainer:
    """Trains `student` on lessons and keeps everything in one checkpoint file, written whole.

    A run that was interrupted, or killed, goes on at its last checkpoint; on a CPU with the same number of
    threads it ends with the bits of an uninterrupted one. On a GPU sums are made in no fixed order.
    """

    def __init__(
        self,
        student: Student,
        training: Sequence[Lesson],
        validation: Sequence[Lesson],
        weights: Sequence[NDArray[np.float32]],
        settings: TrainSettings,
        path: Path,
        device: torch.device,
    ) -> None:
        """weights: [answer] for each lesson of training."""
        self.student, self._settings, self._path, self._device = student, settings, path, device
        self._training, self._weights = training, weights
        student.model.to(device)
        self._optimizer = torch.optim.AdamW(
            student.model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=WEIGHT_DECAY,
        )
        lengths = text_lengths(training)
        self._lengths = lengths
        self._steps = steps(lengths, settings.batch_tokens, settings.num_epochs, settings.seed)
        self._every = -(-len(self._steps) // NUM_EVALUATIONS)
        self._validation = [batch.to(device) for batch in self._validation_batches(validation)]
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.is_done = False
        self._best: dict[str, torch.Tensor] = {}
        self._loss = (0.0, 0.0)
        if path.exists():
            self._load()

    @property
    def best_hits(self) -> float:
        """Share of the validation's tokens that the best student so far finds first."""
        return max((evaluation["top1"] for evaluation in self.history), default=-1.0)

    def train(self, name: str, *, quiet: bool) -> None:
        """Until the last step, or until the validation gets no better; leaves the student at its best.

        Raises Interrupted after Ctrl-C, SpecinferError where the disk is full: the same call goes on.
        """
        saved = time.monotonic()
        num_tokens = 0
        with (
            catch_interrupt() as interrupt,
            Meter(name, len(self._steps), start=self.step, quiet=quiet) as meter,
        ):
            while not self.is_done:
                num_tokens += self._one_step()
                is_last = self.step == len(self._steps)
                if is_last or self.step % self._every == 0:
                    self._evaluate()
                    self.is_done = is_last or self._is_stale()
                meter.show(self.step, f"{self._report()}, {num_tokens / meter.seconds:.0f} tokens/s")
                if self.is_done or interrupt.is_set or time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                    self._save()
                    saved = time.monotonic()
                if interrupt.is_set and not self.is_done:
                    raise Interrupted(
                        f"interrupted: {name} has done {self.step} of {len(self._steps)} steps; "
                        "the same command resumes"
                    )
        self.student.model.load_state_dict(self._best)

    @torch.no_grad()
    def ranks(self, lessons: Sequence[Lesson], *, quiet: bool) -> list[NDArray[np.uint8]]:
        """As `draft_ranks`, of the target's likeliest tokens by the student as it is; texts are read as in
        training."""
        self.student.model.eval()
        result: dict[int, NDArray[np.uint8]] = {}
        with Meter("ranking", len(lessons), quiet=quiet) as meter:
            for members in micro_batches(text_lengths(lessons), np.arange(len(lessons))):
                batch = self._batch([lessons[i] for i in members]).to(self._device)
                wanted = batch.top_ids[:, 0].cpu().numpy()
                found = places(self._logits(batch), wanted)
                ends = np.cumsum([lessons[i].text.num_rows for i in members])
                result |= dict(zip(members.tolist(), np.split(found, ends[:-1]), strict=True))
                meter.show(len(result), "answers")
        return [result[i] for i in range(len(lessons))]

    def _one_step(self) -> int:
        """One optimizer step; returns the tokens it read."""
        chosen = self._steps[self.step]
        rate = learning_rate(self.step, len(self._steps), self._settings.learning_rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        total_weight = float(sum(self._weights[i].sum() for i in chosen))
        self.student.model.train()
        total = 0.0
        for number, members in enumerate(micro_batches(self._lengths, chosen)):
            batch = micro_batch(
                [self._training[i] for i in members],
                [self._weights[i] for i in members],
                self.student.draft_ids,
                self.student.fed_ids,
            ).to(self._device)
            with torch.no_grad(), self._autocast():
                rng = np.random.default_rng([self._settings.seed, self.step, number])
                batch = self.student.as_drafting(batch, rng)
            loss = top_k_loss(self._logits(batch), batch.top_ids, batch.top_probs, batch.weights)
            loss = loss / max(total_weight, 1e-6)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self._loss = (self._loss[0] + total, self._loss[1] + 1)
        return int(self._lengths[chosen].sum())

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        with self._autocast():
            return self.student.logits(batch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda")

    def _validation_batches(self, validation: Sequence[Lesson]) -> Iterator[MicroBatch]:
        num_rows = np.cumsum([lesson.text.num_rows for lesson in validation])
        kept = validation[: int((num_rows < MAX_VALIDATION_ROWS).sum()) + 1]
        for members in micro_batches(text_lengths(kept), np.arange(len(kept))):
            yield self._batch([kept[i] for i in members])

    def _batch(self, lessons: Sequence[Lesson]) -> MicroBatch:
        ones = [np.ones(lesson.text.num_rows, np.float32) for lesson in lessons]
        return micro_batch(lessons, ones, self.student.draft_ids, self.student.fed_ids)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """How often the target's likeliest token is among the student's best 1 to 4."""
        self.student.model.eval()
        hits, num_rows = np.zeros(len(WIDTHS)), 0
        for batch in self._validation:
            best = self._logits(batch).float().topk(max(WIDTHS), dim=1).indices
            found = (best == batch.top_ids[:, :1]).cumsum(dim=1)
            hits += found.sum(dim=0).cpu().numpy()
            num_rows += len(found)
        shares = hits / max(1, num_rows)
        is_better = shares[0] > self.best_hits
        evaluation = {"step": float(self.step), "loss": self._loss[0] / max(1.0, self._loss[1])}
        self.history.append(
            evaluation | {f"top{width}": float(share) for width, share in zip(WIDTHS, shares, strict=True)}
        )
        self._loss = (0.0, 0.0)
        if is_better:
            state = self.student.model.state_dict()
            self._best = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def _is_stale(self) -> bool:
        best = max(range(len(self.history)), key=lambda i: (self.history[i]["top1"], -i))
        return len(self.history) - 1 - best >= PATIENCE

    def _report(self) -> str:
        if not self.history:
            return f"loss {self._loss[0] / max(1.0, self._loss[1]):.3f}"
        last = self.history[-1]
        hits = "/".join(f"{last[f'top{width}']:.3f}" for width in WIDTHS)
        return f"loss {last['loss']:.3f}, top-1..{WIDTHS[-1]} {hits}"

    def _save(self) -> None:
        content = io.BytesIO()
        torch.save(
            {
                "step": self.step,
                "is_done": self.is_done,
                "history": self.history,
                "loss": list(self._loss),
                "best": self._best,
                "model": {} if self.is_done else self.student.model.state_dict(),
                "optimizer": {} if self.is_done else self._optimizer.state_dict(),
            },
            content,
        )
        write_whole(self._path, content.getvalue())

    def _load(self) -> None:
        state = read_checkpoint(self._path)
        self.step, self.is_done, self.history = state["step"], state["is_done"], state["history"]
        self._loss, self._best = (state["loss"][0], state["loss"][1]), state["best"]
        if not self.is_done:
            self.student.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """As a Trainer wrote it. Raises ConfigError for one that is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} is damaged ({error})", hint="remove it: training begins again") from None
    return state
