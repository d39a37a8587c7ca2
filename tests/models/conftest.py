"""Tiny models of every family, written by transformers, and runners over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specinfer.attention import Span
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, Runner, WorkItem, make_pool, make_torch_runner
from specinfer.runtime.batch import trunk_and_tree

CPU = torch.device("cpu")
VOCAB = 300
WriteFamily = Callable[..., tuple[Path, PreTrainedModel]]
MakeRunner = Callable[..., Runner]

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
}


def family_config(model_type: str, **changes: Any) -> Any:
    """A transformers configuration of a two-layer model."""
    if model_type in SIZES:
        common = {key: SMALL[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        sizes = {**common, **SIZES[model_type]}
    else:
        sizes = {**SMALL, "head_dim": 8}
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


@pytest.fixture(scope="session")
def write_family() -> WriteFamily:
    """write_family(directory, model_type, **config changes): a random model, saved and in memory (fp32)."""

    def write(directory: Path, model_type: str, **changes: Any) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(family_config(model_type, **changes)).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Wild enough that logits depend on the whole context.
                noise = torch.randn_like(parameter)
                if parameter.ndim == 1:
                    parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))
                else:
                    is_table = "emb" in name or "wte" in name or "wpe" in name
                    parameter.copy_(noise if is_table else 1.5 * noise / parameter.shape[1] ** 0.5)
        model.save_pretrained(directory)
        return directory, model

    return write


@pytest.fixture(scope="session")
def make_runner() -> MakeRunner:
    """make_runner(path, dtype, num_slots, max_position): a torch runner over a checkpoint."""

    def make(
        path: Path, dtype: torch.dtype = torch.float32, num_slots: int = 300, max_position: int = 512
    ) -> Runner:
        checkpoint = open_checkpoint(path)
        pool = make_pool(checkpoint.config, num_slots, dtype, CPU)
        return make_torch_runner(checkpoint, LinearFactory(dtype, CPU), pool, max_position)

    return make


@pytest.fixture(scope="session")
def assert_equal_logits() -> Callable[[Runner, PreTrainedModel], None]:
    """assert_equal_logits(ours, theirs): a prompt, decoding after it, and each node of a tree as its path."""

    def check(ours: Runner, theirs: PreTrainedModel) -> None:
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, VOCAB, 90)
        slots = rng.permutation(300)

        def expected(sequence: np.ndarray) -> torch.Tensor:
            with torch.no_grad():
                return theirs(torch.from_numpy(sequence)[None]).logits[0]

        def run(context_len: int, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
            n = len(tokens)
            span = Span(slots[:context_len], slots[context_len : context_len + n], parents)
            return ours.run(Batch.of([WorkItem(span, tokens, np.arange(n))]))[0]

        def compare(got: torch.Tensor, want: torch.Tensor) -> None:
            torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item(), rtol=1e-5)

        compare(run(0, prompt, np.arange(-1, 89)), expected(prompt))
        one = rng.integers(0, VOCAB, 1)
        compare(run(90, one, np.array([-1]))[0], expected(np.concatenate([prompt, one]))[-1])
        # A trunk of two with a tree of ten below it.
        parents = trunk_and_tree(2, np.array([-1, 0, 1, 1, 0, 4, 4, 6, 7, 0]))
        tokens = rng.integers(0, VOCAB, 11)
        logits = run(90, tokens, parents)
        for node in range(11):
            path, at = [], node
            while at >= 0:
                path.append(at)
                at = int(parents[at])
            compare(logits[node], expected(np.concatenate([prompt, tokens[path[::-1]]]))[-1])

    return check
