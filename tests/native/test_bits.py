"""A node's logits and K/V are those of its path alone, one token at a time: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.attention import Span
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.native import LEVELS, NativeRunner

F32, BF16 = torch.float32, torch.bfloat16
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "odd": {"hidden_size": 52, "intermediate_size": 70, "head_dim": 16, "num_attention_heads": 6},
    "group_1": {"num_attention_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    "group_3": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 72},
    "group_2": {"head_dim": 96, "num_key_value_heads": 2},
    "group_4": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "hidden_size": 40},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 33, "head_dim": 32},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 24},
    "opt": {"hidden_size": 48, "num_attention_heads": 3},
    "gpt2": {"n_embd": 48, "n_head": 6, "n_inner": 70},
}
CONTEXTS = (0, 1, 63, 64, 70, 250, 300)  # a block of keys is 256


def random_tree(rng: np.random.Generator, n: int) -> np.ndarray:
    """Chains, bushes and several tops, a parent before its child."""
    kind = rng.integers(3)
    parents = [-1]
    for i in range(1, n):
        if kind == 0:
            parents.append(i - 1 if rng.random() < 0.8 else int(rng.integers(i)))
        elif kind == 1:
            parents.append(int(rng.integers(-1, i)))
        else:
            parents.append(int(rng.integers(max(0, i - 3), i)))
    return np.array(parents)


def path_of(parents: np.ndarray, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


class Alone:
    """Sequences fed one token at a time into a fresh part of a pool, remembered by their tokens."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def __call__(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits after the last token, and its K and V of every layer."""
        if tokens not in self._known:
            slots = np.arange(len(tokens))
            for i, token in enumerate(tokens):
                if tokens[: i + 1] not in self._known or i + 1 < len(tokens):
                    span = Span(slots[:i], slots[i : i + 1], np.array([-1]))
                    item = WorkItem(span, np.array([token]), np.array([0]))
                    logits, _ = self._runner.run(Batch.of([item]))
                else:
                    continue
                pool = self._runner.pool
                rows = [t[i].clone() for t in (*pool.k, *pool.v)]
                self._known[tokens[: i + 1]] = logits[0].clone(), rows
        return self._known[tokens]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weights", "kv"), [(F32, F32), (BF16, BF16), (F32, BF16)])
@pytest.mark.parametrize("level", LEVELS)
def test_nodes_equal_their_paths(
    shape: str,
    weights: torch.dtype,
    kv: torch.dtype,
    level: str,
    tmp_path,  # noqa: ANN001
    write_model,  # noqa: ANN001
    runners,  # noqa: ANN001
) -> None:
    path = write_model(tmp_path, tokenizer=False, **SHAPES[shape])
    check_nodes(lambda threads: runners.native(path, weights, kv, level, num_threads=threads))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("level", "kv", "keep"),
    [("", BF16, "dtype"), ("avx2", F32, "dtype"), ("portable", BF16, "int8")],
    ids=["best", "avx2", "portable"],
)
def test_nodes_of_every_family(
    level: str,
    kv: torch.dtype,
    keep: str,
    family: str,
    tmp_path,  # noqa: ANN001
    write_family,  # noqa: ANN001
    runners,  # noqa: ANN001
) -> None:
    path, _ = write_family(tmp_path, family, **FAMILIES[family])
    check_nodes(lambda threads: runners.native(path, F32, kv, level, threads, keep))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("level", LEVELS)
def test_quantized_nodes_equal_their_paths(kind: str, level: str, tmp_path, write_model, runners) -> None:  # noqa: ANN001
    path = write_model(
        tmp_path / "model", tokenizer=False, num_attention_heads=6, head_dim=16, hidden_size=64
    )
    check_nodes(lambda threads: runners.quantized(path, kind, level, threads))


def check_nodes(make: Callable[[int], NativeRunner]) -> None:
    """Random trees in batches by runners of 1 and 2 threads, against their paths alone."""
    rng = np.random.default_rng(0)
    alone = Alone(make(1))
    runner = {t: make(t) for t in (1, 2)}
    num_slots = runner[1].pool.num_slots
    prompts = {n: rng.integers(0, 300, n) for n in CONTEXTS}
    for round_, (batch_size, threads) in enumerate([(1, 1), (8, 2), (1, 2), (8, 1), (3, 2)]):
        slots = rng.permutation(num_slots)
        contexts, trees = [], []
        for r in range(batch_size):
            length = CONTEXTS[int(rng.integers(len(CONTEXTS)))] if batch_size < 8 else (0, 1, 7)[r % 3]
            prompt, slots = prompts.setdefault(length, rng.integers(0, 300, length)), slots
            contexts.append((prompt, slots[:length]))
            slots = slots[length:]
            if length:
                span = Span(slots[:0], contexts[-1][1], np.arange(-1, length - 1))
                runner[threads].run(Batch.of([WorkItem(span, prompt, np.zeros(0, np.int64))]))
            parents = random_tree(rng, int(rng.integers(1, 20)))
            trees.append((parents, rng.integers(0, 300, len(parents)), slots[: len(parents)]))
            slots = slots[len(parents) :]
        items = [
            WorkItem(Span(context, where, parents), tokens, np.arange(len(tokens)))
            for (_, context), (parents, tokens, where) in zip(contexts, trees, strict=True)
        ]
        logits, _ = runner[threads].run(Batch.of(items))
        row = 0
        pool = runner[threads].pool
        for (prompt, _), (parents, tokens, where) in zip(contexts, trees, strict=True):
            for node in range(len(tokens)):
                expected, kv_rows = alone((*prompt.tolist(), *tokens[path_of(parents, node)].tolist()))
                assert torch.equal(logits[row], expected), (round_, node)
                for ours, right in zip((*pool.k, *pool.v), kv_rows, strict=True):
                    assert torch.equal(ours[where[node]], right), (round_, node)
                row += 1


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("level", LEVELS)
def test_chunks_and_threads(kind: str, level: str, tmp_path, write_model, runners) -> None:  # noqa: ANN001
    """A prompt in chunks of every size, by 1 to 64 threads: the same logits and K/V."""
    sizes = (96, 160) if kind.startswith("q") else (72, 100)
    path = write_model(
        tmp_path / "model", tokenizer=False, hidden_size=sizes[0], intermediate_size=sizes[1], head_dim=16
    )
    prompt = np.random.default_rng(1).integers(0, 300, 330)
    slots = np.arange(400)
    results = []
    for chunk, threads in ((330, 2), (1, 1), (2, 2), (3, 1), (7, 3), (13, 64), (33, 1), (97, 2)):
        if kind in ("float32", "bfloat16"):
            dtype = getattr(torch, kind)
            runner = runners.native(path, dtype, dtype, level, num_threads=threads)
        else:
            runner = runners.quantized(path, kind, level, threads)
        assert runner.model.num_threads == threads
        rows = []
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            span = Span(slots[:start], slots[start : start + len(part)], np.arange(-1, len(part) - 1))
            rows.append(runner.run(Batch.of([WorkItem(span, part, np.arange(len(part)))]))[0])
        results.append((torch.cat(rows), *runner.pool.k, *runner.pool.v))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
