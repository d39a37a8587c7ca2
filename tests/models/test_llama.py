"""Our Llama against transformers' own, prompt and tree steps, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specinfer.attention import Span
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, ModelRunner, WorkItem, make_pool, make_torch_runner
from specinfer.runtime.batch import trunk_and_tree

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 16},
    "attention_bias": {"attention_bias": True},
    "all_biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "before_transformers_5": {
        "rope_parameters": None,
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
}


def make_runner(path: Path, dtype: torch.dtype = torch.float32, num_slots: int = 300) -> ModelRunner:
    """A runner over a directory's model."""
    checkpoint = open_checkpoint(path)
    pool = make_pool(checkpoint.config, num_slots, dtype, CPU)
    return make_torch_runner(checkpoint, LinearFactory(dtype, CPU), pool, 512)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path, write_model) -> None:  # noqa: ANN001
    path = write_model(tmp_path, scale=1.0, tokenizer=False, **CONFIGS[name])
    theirs = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    ours = make_runner(path)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 300, 90)
    slots = rng.permutation(300)

    span = Span(slots[:0], slots[:90], np.arange(-1, 89))
    logits, _ = ours.run(Batch.of([WorkItem(span, prompt, np.arange(90))]))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(prompt)[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    # A trunk of two with a tree of ten below it: every node against its own path as a plain sequence.
    parents = np.array([-1, 0, 1, 1, 0, 4, 4, 6, 7, 0])
    tokens = rng.integers(0, 300, 11)
    span = Span(slots[:90], slots[90:101], trunk_and_tree(2, parents))
    logits, captured = ours.run(Batch.of([WorkItem(span, tokens, np.arange(11))]), capture_layers=(0, 1))
    assert set(captured) == {0, 1} and captured[1].shape == (11, 32)
    for node in range(11):
        path_nodes, at = [], node
        while at >= 0:
            path_nodes.append(at)
            at = int(span.parents[at])
        sequence = np.concatenate([prompt, tokens[path_nodes[::-1]]])
        with torch.no_grad():
            expected = theirs(torch.from_numpy(sequence)[None]).logits[0, -1]
        torch.testing.assert_close(logits[node], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_rows(dtype: torch.dtype, tmp_path: Path, write_model) -> None:  # noqa: ANN001
    """A prompt in chunks of every size, and 1 or 2 threads: the same logits and K/V, to the bit."""
    path = write_model(tmp_path, tokenizer=False, hidden_size=64, intermediate_size=96, head_dim=16)
    prompt = np.random.default_rng(1).integers(0, 300, 150)
    slots = np.arange(300)
    threads = torch.get_num_threads()
    results = []
    try:
        for chunk, num_threads in ((150, 2), (1, 2), (2, 1), (7, 2), (33, 1), (96, 2), (97, 2), (143, 1)):
            torch.set_num_threads(num_threads)
            runner = make_runner(path, dtype)
            rows = []
            for start in range(0, len(prompt), chunk):
                part = prompt[start : start + chunk]
                span = Span(slots[:start], slots[start : start + len(part)], np.arange(-1, len(part) - 1))
                rows.append(runner.run(Batch.of([WorkItem(span, part, np.arange(len(part)))]))[0])
            results.append((torch.cat(rows), runner.pool.k[1].clone(), runner.pool.v[1].clone()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
