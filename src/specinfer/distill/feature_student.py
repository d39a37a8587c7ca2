"""FeatureStudent: one layer that reads the target's last hidden row of the position before beside each token.

EAGLE (Li et al., arXiv 2401.15077): such a feature holds what the target knew there, so that little is left
to learn. Deeper in a tree, where the target has not been yet, a draft reads its own last hidden row instead.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specinfer.distill.batches import MicroBatch
from specinfer.distill.inheritance import has_llama_layers
from specinfer.distill.student import Student, llama_settings
from specinfer.errors import ConfigError
from specinfer.models.borrowed import EMBEDDING, head_rows
from specinfer.models.loader import Checkpoint
from specinfer.models.weights import FEATURES
from specinfer.runtime.features import read_rows

OWN_SHARE = 0.3
"""Of the rows read in training, the student's own."""
NOISE_SHARE = 0.3
"""Of nn.Linear's random weights, what a fresh student begins with."""


class FeatureModel(nn.Module):
    """Layers and a norm; below them `features`, and around them the target's embedding and head, which are
    neither trained nor stored."""

    embedding: torch.Tensor
    head: torch.Tensor

    def __init__(
        self, config: Any, target: Checkpoint, vocab: NDArray[np.int64] | None, scale: float
    ) -> None:
        """config: of a transformers LlamaModel; scale: root mean square of the rows that `features` makes."""
        from transformers import LlamaModel

        super().__init__()
        self.config, self.scale = config, scale
        self.features = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.model = LlamaModel(config)
        self.norm, self.model.norm = self.model.norm, nn.Identity()
        self.model.embed_tokens = None
        self.register_buffer("embedding", target.weights.get(EMBEDDING), persistent=False)
        self.register_buffer("head", head_rows(target, vocab).float(), persistent=False)

    def rows(self, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """token_ids: [texts, length] the target's; features: [texts, length, hidden] last hidden rows of the
        positions before. -> [texts, length, hidden], the last hidden rows, before the norm."""
        read = read_rows(self.embedding[token_ids], features)
        rows: torch.Tensor = self.model(
            inputs_embeds=self.scale * self.features(read), use_cache=False
        ).last_hidden_state
        return rows

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden], as `rows` gives them -> [n, draft vocabulary]."""
        return nn.functional.linear(self.norm(rows), self.head)


class FeatureStudent(Student):
    """A FeatureModel. It reads all of the target's tokens, whatever it speaks."""

    def __init__(self, model: FeatureModel, vocab: NDArray[np.int64] | None, target_vocab_size: int) -> None:
        super().__init__(model, vocab, target_vocab_size)
        self.fed_ids = np.arange(target_vocab_size)

    @staticmethod
    def fresh(
        vocab: NDArray[np.int64] | None, target: Checkpoint, scale: float, seed: int, num_layers: int = 1
    ) -> FeatureStudent:
        """The target's last layers and norm, which read the feature and a little of a seed's noise.

        scale: root mean square of the target's last hidden rows. Raises ConfigError, see `draft_config`.
        """
        config = draft_config(target, vocab, num_layers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = FeatureModel(config, target, vocab, scale)
        own = re.compile(r"(?<=layers\.)\d+")
        first = target.config.num_layers - num_layers
        for name, tensor in model.state_dict().items():
            if name == FEATURES:
                tensor.mul_(NOISE_SHARE)[:, config.hidden_size :] += torch.eye(config.hidden_size)
            else:
                source = own.sub(lambda number: str(first + int(number[0])), stored_name(name))
                tensor.copy_(target.weights.get(source))
        return FeatureStudent(model, vocab, target.config.vocab_size)

    @staticmethod
    def further(checkpoint: Checkpoint, target: Checkpoint, scale: float) -> FeatureStudent:
        """Go on from what `open_draft` opened; scale: see `fresh`. Raises ConfigError, see `draft_config`."""
        vocab = checkpoint.draft_vocab
        config = draft_config(target, vocab, checkpoint.config.num_layers)
        model = FeatureModel(config, target, vocab, scale)
        for name, tensor in model.state_dict().items():
            tensor.copy_(checkpoint.weights.get(stored_name(name)))
            if name == FEATURES:
                tensor.div_(scale)
        return FeatureStudent(model, vocab, target.config.vocab_size)

    def logits(self, batch: MicroBatch) -> torch.Tensor:
        assert batch.features is not None, "lessons for this student have features"
        rows = self.model.rows(batch.token_ids, batch.features)
        logits: torch.Tensor = self.model.logits(rows.flatten(0, 1).index_select(0, batch.rows))
        return logits

    def as_drafting(self, batch: MicroBatch, rng: np.random.Generator) -> MicroBatch:
        """With the student's own rows in place of a random share of the target's."""
        assert batch.features is not None, "lessons for this student have features"
        own = self.model.rows(batch.token_ids, batch.features)[:, :-1]
        is_own = torch.from_numpy(rng.random(batch.token_ids.shape) < OWN_SHARE).to(own.device)
        before = nn.functional.pad(own, (0, 0, 1, 0))
        return replace(batch, features=torch.where(is_own[..., None], before, batch.features))

    def state(self) -> dict[str, torch.Tensor]:
        state = {stored_name(name): tensor for name, tensor in self.model.state_dict().items()}
        return {**state, FEATURES: self.model.scale * state[FEATURES]}


def stored_name(name: str) -> str:
    """Of a FeatureModel's weight: the one that the same weight has in a Llama's checkpoint."""
    return f"model.{name}" if name == "norm.weight" else name


def draft_config(target: Checkpoint, vocab: NDArray[np.int64] | None, num_layers: int) -> Any:
    """The LlamaConfig of layers like the target's last. Raises ConfigError where training has no such layers,
    or the target not so many."""
    from transformers import LlamaConfig

    config = target.config
    if not has_llama_layers(config):
        raise ConfigError(
            f"{target.path} is of type {config.model_type}: feature drafts are trained for a llama alone",
            hint="leave out --features: drafts that read tokens are made for any target",
        )
    if num_layers > config.num_layers:
        raise ConfigError(
            f"{target.path} has {config.num_layers} layers, and a draft of {num_layers} is wanted",
            hint="give fewer --members",
        )
    changed = {
        "vocab_size": config.vocab_size if vocab is None else len(vocab),
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    return LlamaConfig(**{**llama_settings(target), **changed})
