"""Distillation: the four stages, each going on from what lies in its directory."""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.distill.answers import AnswerFile, fits, jobs, write_answers
from specinfer.distill.boost import boost_weights, compare, forward_milliseconds
from specinfer.distill.card import model_card
from specinfer.distill.curve import curve
from specinfer.distill.feature_student import FeatureStudent, draft_config
from specinfer.distill.features import root_mean_square
from specinfer.distill.hits import coverage, draft_ranks
from specinfer.distill.inheritance import has_llama_layers, sample_rows
from specinfer.distill.judge import paces
from specinfer.distill.lessons import Lesson, make_lessons
from specinfer.distill.passages import own_passages
from specinfer.distill.prompts import PARTS, Part, Prompt, part_of, read_prompts, takes_chat
from specinfer.distill.questions import own_questions
from specinfer.distill.seeds import built_in_prompts
from specinfer.distill.settings import DistillSettings, num_passages
from specinfer.distill.shape import HEAD_DIM, Shape, parse_size, shape_of
from specinfer.distill.storage import check_settings, make_directory, write_json, write_whole
from specinfer.distill.student import Student, open_draft
from specinfer.distill.token_student import TokenStudent
from specinfer.distill.trainer import Trainer, TrainSettings
from specinfer.distill.vocabulary import choose_vocab, token_counts
from specinfer.engine.build import resolve_device
from specinfer.errors import ConfigError
from specinfer.llm import LLM
from specinfer.models.catalog import resolve_model_path
from specinfer.models.loader import Checkpoint, open_checkpoint

logger = logging.getLogger("specinfer")
NUM_JUDGED_PROMPTS = 12
JUDGED_TOKENS = 64


class Draft(NamedTuple):
    """A trained draft. directory: of its checkpoint."""

    name: str
    directory: Path
    num_parameters: int


class Distillation:
    """One run, in the directory `out`:

    data/        the target's answers and what it thought of them; may be shared between runs
    training/    settings, a checkpoint and a curve for each draft
    .            the draft: weights, config, vocabulary, model card, figures
    member-2/ .. the other members, and larger/, the draft that they are compared with
    """

    def __init__(
        self, settings: DistillSettings, out: Path, data: Path | None = None, *, quiet: bool
    ) -> None:
        """What can be wrong is found here, before any work. Raises ConfigError, ModelError, RequestError."""
        self.settings, self.out, self.data, self._quiet = settings, out, data or out / "data", quiet
        self._device = resolve_device(settings.device)
        self.target: Checkpoint = open_checkpoint(resolve_model_path(settings.target))
        tokenizer = self.target.tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{settings.target} has no tokenizer to read prompts with")
        self._end_token_ids = tokenizer.eos_token_ids
        self._vocab_size = min(settings.vocab_size, self.target.config.vocab_size)
        if settings.features:
            draft_config(self.target, None, settings.num_members)
        elif settings.init is None:
            self._shape(1)
        self._init: Checkpoint | None = None
        if settings.init is not None:
            self._init = open_draft(
                settings.init, settings.target, self.target, reads_features=settings.features
            )
        prompts = (
            built_in_prompts(settings.num_prompts, settings.seed)
            if settings.prompts is None
            else read_prompts(settings.prompts)
        )
        self._prompts: list[Prompt] = prompts
        self._num_questions = settings.questions(takes_chat(tokenizer))
        claims = {
            out / "training" / "settings.json": settings.training_record(prompts, self._num_questions),
            self.data / "settings.json": settings.data_record(prompts, self._num_questions),
        }
        if out.exists() and not (out / "training").is_dir() and (out.is_file() or any(out.iterdir())):
            raise ConfigError(f"{out} holds something else", hint="name a new directory, or an earlier run's")
        for path, record in claims.items():
            check_settings(path, record)
        for path, record in claims.items():
            make_directory(path.parent)
            write_json(path, record)

    def run(self) -> dict[str, Any]:
        """All stages that are left. Returns the record that judged.json, written last, holds."""
        judged = self.out / "judged.json"
        if judged.exists():
            record: dict[str, Any] = json.loads(judged.read_bytes())
            return record
        lessons = self.write()
        return self.judge(lessons, self.train(lessons))

    def write(self) -> list[Lesson]:
        """Stage 1, and the target's probabilities for it."""
        s = self.settings
        llm = LLM(s.target, device=s.device, max_num_seqs=s.max_num_seqs)
        is_chat = takes_chat(llm.tokenizer)
        if not is_chat:
            logger.warning("%s has no chat template: it is given conversations as plain text", s.target)
        prompts = [*self._prompts]
        if self._num_questions:
            questions = AnswerFile(self.data / "questions.jsonl")
            prompts += own_questions(
                llm, self._num_questions, s.seed, questions, max_num_seqs=s.max_num_seqs, quiet=self._quiet
            )
            passages = AnswerFile(self.data / "passages.jsonl")
            prompts += own_passages(
                llm,
                num_passages(self._num_questions),
                s.seed,
                passages,
                max_num_seqs=s.max_num_seqs,
                quiet=self._quiet,
            )
        asked = {}
        for number, prompt in enumerate(prompts):
            ids = prompt.token_ids(llm.tokenizer, is_chat)
            if fits(llm, ids, s.max_tokens):
                asked[number] = (prompt.kind, ids)
        if len(asked) < len(prompts):
            num_left_out = len(prompts) - len(asked)
            logger.warning("%d of %d prompts are left out: too long", num_left_out, len(prompts))
        found = Counter(part_of(ids) for _, ids in asked.values())
        for part in PARTS:
            if not found[part]:
                raise ConfigError(
                    f"{len(asked)} of {len(prompts)} prompts fit the context with answers of "
                    f"{s.max_tokens} tokens, and none of them is for {part}, which takes 1 in 20",
                    hint="give more prompts, 100 at least",
                )
        todo = jobs(asked, s.seed)
        file = AnswerFile(self.data / "answers.jsonl")
        answers = write_answers(
            llm, todo, file, max_tokens=s.max_tokens, max_num_seqs=s.max_num_seqs, quiet=self._quiet
        )
        layer = self.target.config.num_layers - 1 if s.features else None
        return make_lessons(
            llm, [answers[job.index] for job in todo], self.data, layer=layer, quiet=self._quiet
        )

    def train(self, lessons: Sequence[Lesson]) -> list[Draft]:
        """Stages 2 and 4: the draft; with several members the others, and one draft of their size."""
        s, n = self.settings, self.settings.num_members
        training = parts(lessons, "train")
        num_rows = [lesson.text.num_rows for lesson in training]
        student = self._students(training)
        drafts: list[Draft] = []
        members: list[list[NDArray[np.uint8]]] = []
        for i in range(1, n + 1):
            directory = self.out if i == 1 else self.out / f"member-{i}"
            weights, seed = boost_weights(members, num_rows), s.seed + i - 1
            trainer = self._trainer(f"member-{i}", lessons, student(1, seed), weights, seed)
            drafts.append(self._trained(trainer, f"member-{i}", directory))
            if i < n:
                members.append(trainer.ranks(training, quiet=self._quiet))
        if n > 1:
            weights, seed = boost_weights([], num_rows), s.seed + n
            trainer = self._trainer("larger", lessons, student(n, seed), weights, seed)
            drafts.append(self._trained(trainer, "larger", self.out / "larger"))
        return drafts

    def _students(self, training: Sequence[Lesson]) -> Callable[[int, int], Student]:
        """(times the size asked for, seed) -> a student to train."""
        s, target, init = self.settings, self.target, self._init
        counts = token_counts(training, target.config.vocab_size)
        vocab = choose_vocab(counts, self._vocab_size, self._end_token_ids)
        if s.features:
            scale = root_mean_square(lesson.features for lesson in training if lesson.features is not None)
            if init is not None:
                return lambda _, seed: FeatureStudent.further(init, target, scale)
            return lambda times, seed: FeatureStudent.fresh(vocab, target, scale, seed, times)
        if init is not None:
            return lambda scale, seed: TokenStudent.further(init, target)
        rows = sample_rows(
            LLM(s.target, device=s.device, max_num_seqs=1),
            target,
            [lesson.text for lesson in training],
            max(self._shape(1).num_layers, self._shape(s.num_members).num_layers),
        )
        return lambda scale, seed: TokenStudent.fresh(self._shape(scale), vocab, target, rows, seed)

    def _shape(self, scale: int) -> Shape:
        """Of a fresh draft of `scale` times the size asked for. Raises ConfigError."""
        config = self.target.config
        head_dim = config.head_dim if has_llama_layers(config) else HEAD_DIM
        return shape_of(scale * parse_size(self.settings.token_size), self._vocab_size, head_dim)

    def _trainer(
        self,
        name: str,
        lessons: Sequence[Lesson],
        student: Student,
        weights: Sequence[NDArray[np.float32]],
        seed: int,
    ) -> Trainer:
        s = self.settings
        return Trainer(
            student,
            parts(lessons, "train"),
            parts(lessons, "validation"),
            weights,
            TrainSettings(
                num_epochs=s.num_epochs,
                learning_rate=s.peak_rate,
                batch_tokens=s.batch_tokens,
                seed=seed,
            ),
            self.out / "training" / f"{name}.pt",
            self._device,
        )

    def _trained(self, trainer: Trainer, name: str, directory: Path) -> Draft:
        """The draft, saved when it has learnt."""
        trainer.train(f"training {name}", quiet=self._quiet)
        trainer.student.save(directory)
        write_whole(self.out / "training" / f"{name}.svg", curve(trainer.history).encode())
        return Draft(name, directory, trainer.student.num_parameters)

    def judge(self, lessons: Sequence[Lesson], drafts: Sequence[Draft]) -> dict[str, Any]:
        """Stage 3: figures and model card."""
        s = self.settings
        training = parts(lessons, "train")
        held_out = [lesson for lesson in parts(lessons, "test") if lesson.temperature == 0]
        ranks = [self._ranks(draft, held_out) for draft in drafts]
        members = drafts[: s.num_members]
        prompts = [lesson.text.prompt.tolist() for lesson in held_out]
        prompts = prompts[:NUM_JUDGED_PROMPTS]
        setups = {"draft": members[:1]}
        if s.num_members > 1:
            setups |= {f"members 1 to {s.num_members}": members, "larger": drafts[-1:]}
        record: dict[str, Any] = {
            **s.training_record(self._prompts, self._num_questions),
            "machine": f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
            "reads_features": s.features,
            "num_lessons": len(training),
            "num_training_tokens": sum(lesson.text.num_rows for lesson in training),
            "num_held_out_tokens": sum(lesson.text.num_rows for lesson in held_out),
            "drafts": [
                {
                    "name": draft.name,
                    "num_parameters": draft.num_parameters,
                    "coverage": coverage(found, s.features),
                }
                for draft, found in zip(drafts, ranks, strict=True)
            ],
            "boosting": None,
            "num_judged_prompts": len(prompts),
            "paces": {
                name: [
                    asdict(pace)
                    for pace in paces(
                        s.target,
                        [str(draft.directory) for draft in used],
                        prompts,
                        max_tokens=min(JUDGED_TOKENS, s.max_tokens),
                        device=s.device,
                        quiet=self._quiet,
                    )
                ]
                for name, used in setups.items()
            },
        }
        if s.num_members > 1:
            costs = [forward_milliseconds(s.target, draft.directory, s.device) for draft in drafts]
            record["boosting"] = compare(ranks[:-1], ranks[-1], costs, s.features)
        write_whole(self.out / "README.md", model_card(record).encode())
        write_json(self.out / "judged.json", record)
        return record

    def _ranks(self, draft: Draft, lessons: Sequence[Lesson]) -> list[NDArray[np.uint8]]:
        """Places of the target's likeliest tokens."""
        return draft_ranks(
            self.settings.target,
            draft.directory,
            [lesson.text for lesson in lessons],
            [lesson.top_ids[:, 0].astype(np.int64) for lesson in lessons],
            self.target.config.vocab_size,
            self.settings.device,
        )


def parts(lessons: Sequence[Lesson], part: Part) -> list[Lesson]:
    """Those of one part."""
    return [lesson for lesson in lessons if lesson.part == part]
