"""Every family and feature against transformers' own code, to rounding, and against itself, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.attention import Span
from specinfer.models.families import SUPPORTED_MODEL_TYPES
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.native import extension, why_not

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
UPPER_WINDOW = {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-multi_head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi_query": ("llama", {"num_key_value_heads": 1}),
    "llama-wide_heads": ("llama", {"head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("llama", rope("default", rope_theta=500000.0)),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=4.0)),
    "llama-llama3": ("llama", rope("llama3", factor=8.0, original_max_position_embeddings=64, **LLAMA3)),
    "llama-yarn": ("llama", rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "llama-yarn-options": (
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "llama-longrope-long": (
        "llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}},
    ),
    "llama-longrope-short": (
        "llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 512, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 33}),
    "mistral-no_window": ("mistral", {"sliding_window": None}),
    "mistral-narrow": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", UPPER_WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3-window": ("qwen3", UPPER_WINDOW),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "opt": ("opt", {}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
    "opt-no_bias": ("opt", {"enable_bias": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 96}),
}


def test_every_family_is_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, tmp_path: Path, write_family, make_runner, assert_equal_logits
) -> None:  # noqa: ANN001
    model_type, changes = CASES[case]
    path, theirs = write_family(tmp_path, model_type, **changes)
    assert_equal_logits(make_runner(path), theirs)
    reason = why_not(open_checkpoint(path), torch.device("cpu"))
    assert (reason is not None) == (extension() is None or case == "opt-350m")
    if reason is None:
        assert_equal_logits(make_runner(path, native=True), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2-window", "qwen3", "opt-350m", "gpt2"])
def test_bits_do_not_depend_on_rows(
    case: str,
    dtype: torch.dtype,
    tmp_path: Path,
    write_family,  # noqa: ANN001
    make_runner,  # noqa: ANN001
) -> None:
    """A prompt in chunks of several sizes, and 1 or 2 threads: the same logits and K/V, to the bit."""
    model_type, changes = CASES[case]
    path, _ = write_family(tmp_path, model_type, **changes)
    prompt = np.random.default_rng(1).integers(0, 300, 200)
    slots = np.arange(300)
    threads = torch.get_num_threads()
    results = []
    try:
        for chunk, num_threads in ((200, 1), (1, 1), (7, 1), (97, 2)):
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
