"""From a path to a checkpoint, and from a checkpoint to a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray

from specinfer.errors import ModelError
from specinfer.models.builder import Builder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.families import FAMILIES
from specinfer.models.family import Family
from specinfer.models.gguf import GGUFFile
from specinfer.models.linear import LinearFactory
from specinfer.models.pickled import PickledWeights
from specinfer.models.raw import RawConfig
from specinfer.models.tokenizer import Tokenizer
from specinfer.models.weights import FEATURES, PrefixedWeights, SafetensorsWeights, WeightSource

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config is read and checked, its weights are not.

    draft_vocab: [draft vocabulary] target token ids of a draft that works on a subset, else None.
    """

    path: Path
    config: ModelConfig
    weights: WeightSource
    draft_vocab: NDArray[np.int64] | None = None

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer stored with the weights, None where there is none."""
        if isinstance(self.weights, GGUFFile):
            has_one = "tokenizer.ggml.model" in self.weights.metadata
            return Tokenizer.from_gguf(self.weights) if has_one else None
        if not any((self.path / name).exists() for name in TOKENIZER_FILES):
            return None
        return Tokenizer.from_directory(self.path)

    @property
    def is_foreign(self) -> bool:
        """Whether it runs by transformers' own modelling code."""
        return self.config.model_type not in FAMILIES

    @property
    def head_size(self) -> int:
        """Rows of the head."""
        return self.config.vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    @property
    def embeds_draft_vocab(self) -> bool:
        """Whether the input embedding, too, works on the subset (token ids are mapped before it)."""
        is_small = self.draft_vocab is not None and self.config.vocab_size == len(self.draft_vocab)
        return is_small and not self.reads_features

    @property
    def reads_features(self) -> bool:
        """Whether it is a feature draft: one that reads its target's last hidden rows, and has the target's
        embedding and head in place of its own (`borrow`)."""
        return FEATURES in self.weights.names()


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a Hugging Face directory. Raises ModelError."""
    if path.is_file():
        gguf = GGUFFile(path)
        raw = RawConfig(gguf.config(), path.name)
        native = FAMILIES[raw.read("model_type", str)]
        config = native.read_config(raw).check(raw.source)
        check_layers(native, config, gguf, path.name)
        return Checkpoint(path, config, gguf, check_draft_vocab(gguf.draft_vocab(), path))
    raw = read_raw_config(path / "config.json")
    if raw.values.get("quantization_config") is not None:
        raise ModelError(
            f"{raw.source}: quantised safetensors are not supported",
            hint="use a GGUF file or an unquantised one",
        )
    family = FAMILIES.get(raw.read("model_type", str))
    draft_vocab = read_draft_vocab(path)
    if family is None:
        from specinfer.models import foreign  # takes seconds

        config = foreign.read_config(raw, path).check(raw.source)
        if draft_vocab is not None:
            raise ModelError(f"{path}: a draft on a subset of the vocabulary must be of a native family")
        return Checkpoint(path, config, open_weights(path))
    config = family.read_config(raw).check(raw.source)
    weights = PrefixedWeights.of(open_weights(path), family.prefix)
    check_layers(family, config, weights, str(path))
    if config.tie_embeddings and has_own_head(family, weights):
        config = replace(config, tie_embeddings=False)
    return Checkpoint(path, config, weights, draft_vocab)


def read_raw_config(path: Path) -> RawConfig:
    """config.json. Raises ModelError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent}: no config.json",
            hint="give a Hugging Face model directory, a .gguf file or a hub name",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})", hint="fetch the file again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object", hint="fetch the file again")
    return RawConfig(values, str(path))


def open_weights(directory: Path) -> WeightSource:
    """Safetensors, else a pickled checkpoint. Raises ModelError."""
    if PickledWeights.is_in(directory) and not SafetensorsWeights.is_in(directory):
        return PickledWeights(directory)
    return SafetensorsWeights(directory)


def read_draft_vocab(directory: Path) -> NDArray[np.int64] | None:
    """`d2t` of draft_vocab.safetensors: [draft vocabulary] target token ids, or None without the file."""
    path = directory / DRAFT_VOCAB_FILE
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(str(path), "pt") as file:
            ids = file.get_tensor("d2t").to(torch.int64).numpy()
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path}: not readable ({error})", hint="fetch the file again") from None
    return check_draft_vocab(ids, path)


def check_draft_vocab(ids: NDArray[np.int64] | None, path: Path) -> NDArray[np.int64] | None:
    """Raises ModelError for what cannot be one."""
    if ids is not None and (
        ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or len(np.unique(ids)) != len(ids)
    ):
        raise ModelError(f"{path}: d2t must be a list of distinct target token ids")
    return ids


def build_model(checkpoint: Checkpoint, factory: LinearFactory, max_position: int) -> Decoder:
    """Load the weights. max_position: positions that will be used. Raises ModelError."""
    family = FAMILIES[checkpoint.config.model_type]
    return family.build(
        Builder(checkpoint.config, checkpoint.weights, factory, max_position, checkpoint.head_size)
    )


def has_own_head(family: Family, weights: WeightSource) -> bool:
    """Whether there is a head that is not the embedding, whatever the config says: a fine-tuned one mostly.
    Transformers, from 5 on, does not tie these either."""
    head, embedding = "lm_head.weight", f"{family.embedding}.weight"
    return head in weights.names() and not torch.equal(weights.get(head), weights.get(embedding))


def check_layers(family: Family, config: ModelConfig, weights: WeightSource, source: str) -> None:
    """A config that names fewer layers than there are weights would run, and be another model."""
    if any(name.startswith(f"{family.layers}.{config.num_layers}.") for name in weights.names()):
        raise ModelError(
            f"{source}: the config has {config.num_layers} layers, the weights have more",
            hint="check that config and weights belong to the same model",
        )
