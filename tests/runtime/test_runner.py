"""The runner: ranges of layers, captured rows, batches without logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from specinfer.attention import Span
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, ModelRunner, WorkItem, make_pool, make_torch_runner
from specinfer.runtime.batch import trunk_and_tree

CPU = torch.device("cpu")


def make_runner(path: Path) -> ModelRunner:
    checkpoint = open_checkpoint(path)
    pool = make_pool(checkpoint.config, 64, torch.float32, CPU)
    return make_torch_runner(checkpoint, LinearFactory(torch.float32, CPU), pool, 64)


def trunk(tokens: list[int], logits_rows: list[int]) -> WorkItem:
    n = len(tokens)
    span = Span(np.arange(0), np.arange(n), np.arange(-1, n - 1))
    return WorkItem(span, np.array(tokens), np.array(logits_rows, np.int64))


def test_ranges_of_layers_add_up(tiny_model: Path) -> None:
    runner = make_runner(tiny_model)
    batch = Batch.of([trunk([1, 2, 3, 4, 5], [4])])
    logits, captured = runner.run(batch, capture_layers={0, 1})
    hidden = runner.model.embed(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions))
    first, _ = runner.run_layers(batch, hidden, range(1))
    second, _ = runner.run_layers(batch, first, range(1, 2))
    assert torch.equal(first, captured[0]) and torch.equal(second, captured[1])
    assert torch.equal(runner.model.head(second[4:]), logits)


def test_a_batch_may_want_no_logits(tiny_model: Path) -> None:
    logits, _ = make_runner(tiny_model).run(Batch.of([trunk([1, 2, 3], [])]))
    assert logits.shape == (0, 300)


def test_batch_flattens_in_order() -> None:
    tree = np.array([-1, 0, 1, 0])
    parents = trunk_and_tree(3, tree)
    assert parents.tolist() == [-1, 0, 1, 2, 3, 2]
    item = WorkItem(Span(np.arange(7), np.arange(10, 16), parents), np.arange(6), np.array([2, 3, 4, 5]))
    batch = Batch.of([trunk([9, 9], [1]), item])
    assert batch.positions.tolist() == [0, 1, 7, 8, 9, 10, 11, 10]
    assert batch.logits_rows.tolist() == [1, 4, 5, 6, 7]
