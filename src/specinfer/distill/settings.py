"""DistillSettings: everything a distillation is told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specinfer.config import check_positive
from specinfer.distill.answers import TEMPERATURES
from specinfer.distill.batches import MAX_CONTEXT
from specinfer.distill.prompts import Prompt, digest
from specinfer.distill.shape import parse_size
from specinfer.errors import ConfigError

NUM_QUESTIONS = 2000
QUESTIONS_PER_PASSAGE = 4
DEFAULT_SIZE = "7m"


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Validated on construction.

    target: as EngineConfig.model. prompts: a file for `read_prompts`, None for the built-in ones, of which
    num_prompts are drawn. num_questions: what the target asks itself, besides, and for every 4 of them a
    passage that it writes and is asked about; None is 2000 beside built-in prompts where the target has a
    chat template, else 0. max_tokens: longest answer. features: to make a feature draft, whose size the
    target gives. size: millions of parameters of another, as in "7m", which is what None means. init: a
    draft to go on from, named as EngineConfig's, instead of a size and a vocabulary. vocab_size: tokens that
    the draft works on. num_epochs, learning_rate, batch_tokens: see TrainSettings; a learning rate of None is
    2e-3 for a fresh draft and 5e-4 for one to go on from. num_members: drafts that cover each other. seed: of
    prompts, noise, weights and order. device, max_num_seqs: as EngineConfig; they change no result on a CPU.
    """

    target: str
    prompts: Path | None = None
    num_prompts: int = 2000
    num_questions: int | None = None
    max_tokens: int = 192
    features: bool = False
    size: str | None = None
    init: str | None = None
    vocab_size: int = 16384
    num_epochs: int = 6
    learning_rate: float | None = None
    batch_tokens: int = 2048
    num_members: int = 1
    seed: int = 0
    device: str = "auto"
    max_num_seqs: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int" and field.name != "seed":
                check_positive(field.name, getattr(self, field.name))
        if self.max_tokens > MAX_CONTEXT:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}; of a text at most {MAX_CONTEXT} tokens are learnt from",
                hint=f"lower it to {MAX_CONTEXT} or less",
            )
        if self.num_questions is not None and self.num_questions < 0:
            raise ConfigError(f"num_questions must not be negative, got {self.num_questions}")
        if self.features and self.size is not None:
            raise ConfigError(
                "a feature draft has the size of one of its target's layers",
                hint="give --size or --features, not both",
            )
        parse_size(self.token_size)
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning_rate must be in (0, 1), got {self.learning_rate}")
        if self.init is not None and self.num_members > 1:
            raise ConfigError(
                "members are compared with one draft of their total size, and --init has one size",
                hint="give --init or --members, not both",
            )

    @property
    def token_size(self) -> str:
        """The size meant, of a draft that reads tokens."""
        return DEFAULT_SIZE if self.size is None else self.size

    @property
    def peak_rate(self) -> float:
        """The learning rate meant."""
        return self.learning_rate or (2e-3 if self.init is None else 5e-4)

    def questions(self, is_chat: bool) -> int:
        """How many are meant. is_chat: whether the target has a chat template. Raises ConfigError."""
        if self.num_questions is None:
            return NUM_QUESTIONS if is_chat and self.prompts is None else 0
        if self.num_questions and not is_chat:
            raise ConfigError(
                f"{self.target} has no chat template to ask questions in", hint="leave --num-questions out"
            )
        return self.num_questions

    def data_record(self, prompts: list[Prompt], num_questions: int) -> dict[str, Any]:
        """What decides the answers."""
        return {
            "target": self.target,
            "source": "built-in" if self.prompts is None else self.prompts.name,
            "prompts": digest(prompts),
            "num_questions": num_questions,
            "num_passages": num_passages(num_questions),
            "temperatures": list(TEMPERATURES),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }

    def training_record(self, prompts: list[Prompt], num_questions: int) -> dict[str, Any]:
        """What decides the drafts."""
        return {
            "data": self.data_record(prompts, num_questions),
            "size": None if self.init is not None else "features" if self.features else self.token_size,
            "init": self.init,
            "vocab_size": self.vocab_size if self.init is None else None,
            "num_epochs": self.num_epochs,
            "learning_rate": self.peak_rate,
            "batch_tokens": self.batch_tokens,
            "num_members": self.num_members,
            "seed": self.seed,
        }


def num_passages(num_questions: int) -> int:
    """That the target writes, and is asked about."""
    return num_questions // QUESTIONS_PER_PASSAGE
