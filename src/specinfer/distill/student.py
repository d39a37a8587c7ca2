"""Student: the small model that is trained, and how it becomes a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from specinfer.distill.batches import MicroBatch
from specinfer.distill.inheritance import has_llama_layers
from specinfer.distill.storage import make_directory, write_whole
from specinfer.distill.vocabulary import draft_ids
from specinfer.errors import ConfigError
from specinfer.models.catalog import draft_path
from specinfer.models.gguf import GGUFFile
from specinfer.models.loader import DRAFT_VOCAB_FILE, Checkpoint, open_checkpoint, read_raw_config


class Student(ABC):
    """A torch module with a transformers LlamaConfig. It speaks `vocab`, a subset of the target's vocabulary
    (None: all of it).

    draft_ids: [target vocabulary] what it says for each of the target's tokens, -1 for nothing; fed_ids:
    [target vocabulary] what it is given for each of them.
    """

    fed_ids: NDArray[np.int64]

    def __init__(self, model: Any, vocab: NDArray[np.int64] | None, target_vocab_size: int) -> None:
        self.model = model
        self.vocab = vocab
        self.draft_ids = draft_ids(vocab, target_vocab_size)

    @abstractmethod
    def logits(self, batch: MicroBatch) -> torch.Tensor:
        """[rows, draft vocabulary], the logits after the batch's rows."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, by name."""

    def as_drafting(self, batch: MicroBatch, rng: np.random.Generator) -> MicroBatch:
        """The batch as a student reads it in training, where drafting deep in a tree shows it less."""
        return batch

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def save(self, directory: Path) -> None:
        """bf16 weights in the Hugging Face layout. Raises SpecinferError where the disk is full."""
        make_directory(directory)
        state = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.state().items()
        }
        self.model.config.dtype = torch.bfloat16
        write_whole(directory / "model.safetensors", safetensors.torch.save(state, {"format": "pt"}))
        if self.vocab is not None:
            d2t = {"d2t": torch.from_numpy(self.vocab).to(torch.int32)}
            write_whole(directory / DRAFT_VOCAB_FILE, safetensors.torch.save(d2t))
        write_whole(directory / "config.json", self.model.config.to_json_string().encode())


def open_draft(name: str, target_name: str, target: Checkpoint, *, reads_features: bool) -> Checkpoint:
    """A draft that training can go on from: one that ships for the target, or a model as EngineConfig has it.
    Raises ConfigError or ModelError for what is none."""
    checkpoint = open_checkpoint(draft_path(target_name, name))
    vocab, size = checkpoint.draft_vocab, target.config.vocab_size
    if not has_llama_layers(checkpoint.config) or checkpoint.config.vocab_size != checkpoint.head_size:
        raise ConfigError(
            f"cannot train {name} further",
            hint="give a Llama whose embedding and head have the same tokens",
        )
    if (vocab is None and checkpoint.config.vocab_size != size) or (
        vocab is not None and vocab.max() >= size
    ):
        raise ConfigError(
            f"{name} is no draft for this target: its vocabulary is another",
            hint="start from a draft made for it, or from none",
        )
    if checkpoint.reads_features != reads_features:
        raise ConfigError(
            f"{name} reads {'tokens alone' if reads_features else 'hidden rows of its target'}",
            hint=f"{'leave out' if reads_features else 'give'} --features, or start from another draft",
        )
    return checkpoint


def llama_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a transformers LlamaConfig is made of. Raises ConfigError for positions that it does not have."""
    rope, weights = checkpoint.config.rope, checkpoint.weights
    if rope is not None and rope.freq_factors is not None:
        raise ConfigError(
            f"{checkpoint.path}: no draft can be trained with a GGUF's frequency factors",
            hint="name the model's Hugging Face directory",
        )
    if isinstance(weights, GGUFFile):
        return weights.config()
    return dict(read_raw_config(checkpoint.path / "config.json").values)
