"""Runners over tiny models of every family, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specinfer.attention import Span
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, Runner, WorkItem, make_pool, make_torch_runner
from specinfer.runtime.batch import trunk_and_tree
from specinfer.runtime.native import NativeRunner

CPU = torch.device("cpu")
VOCAB = 300
MakeRunner = Callable[..., Runner]


@pytest.fixture(scope="session")
def make_runner() -> MakeRunner:
    """make_runner(path, dtype, num_slots, max_position, native=False): a runner over a checkpoint, a native
    one with the blocks that a GGUF stores."""

    def make(
        path: Path,
        dtype: torch.dtype = torch.float32,
        num_slots: int = 300,
        max_position: int = 512,
        native: bool = False,
    ) -> Runner:
        checkpoint = open_checkpoint(path)
        pool = make_pool(checkpoint.config, num_slots, dtype, CPU)
        if native:
            return NativeRunner(checkpoint, dtype, pool, max_position, keep="stored")
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
