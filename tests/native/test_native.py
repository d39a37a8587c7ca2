"""The native runner against the torch one; ranges of layers; batches and settings at their edges."""

from __future__ import annotations

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer import LLM, SamplingParams
from specinfer.attention import Span
from specinfer.errors import ConfigError, ModelError
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, ModelRunner, WorkItem
from specinfer.runtime import native as native_module
from specinfer.runtime.batch import trunk_and_tree
from specinfer.runtime.native import LEVELS, NativeRunner

NONE = np.zeros(0, np.int64)
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "multi_query": {"num_key_value_heads": 1},
    "odd": {"hidden_size": 52, "intermediate_size": 70, "num_attention_heads": 6, "head_dim": 16},
    "wide_heads": {"head_dim": 64},
    "attention_bias": {"attention_bias": True},
    "all_biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
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
}


def prompt_item(n: int, slots: np.ndarray, logits_rows: np.ndarray | None = None) -> WorkItem:
    tokens = np.random.default_rng(0).integers(0, 300, n)
    rows = np.arange(n) if logits_rows is None else logits_rows
    return WorkItem(Span(NONE, slots[:n], np.arange(-1, n - 1)), tokens, rows)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_torch(name: str, level: str, tmp_path: Path, write_model, runners) -> None:  # noqa: ANN001
    path = write_model(tmp_path, scale=1.0, tokenizer=False, **CONFIGS[name])
    ours, theirs = runners.native(path, level=level), runners.torch(path)
    slots = np.random.default_rng(1).permutation(300)
    tree = np.array([-1, 0, 1, 1, 0, 4, 4, 6, 7, 0])
    tokens = np.random.default_rng(2).integers(0, 300, 11)
    span = Span(slots[:90], slots[90:101], trunk_and_tree(2, tree))
    for item in (prompt_item(90, slots), WorkItem(span, tokens, np.arange(11))):
        batch = Batch.of([item])
        logits, captured = ours.run(batch, capture_layers=(0, 1))
        expected, expected_rows = theirs.run(batch, capture_layers=(0, 1))
        scale = expected.abs().max().item()
        torch.testing.assert_close(logits, expected, atol=1e-5 * scale, rtol=1e-5)
        for i in (0, 1):
            scale = expected_rows[i].abs().max().item()
            torch.testing.assert_close(captured[i], expected_rows[i], atol=1e-5 * scale, rtol=1e-5)
    for a, b in zip((*ours.pool.k, *ours.pool.v), (*theirs.pool.k, *theirs.pool.v), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item(), rtol=1e-5)
    torch.testing.assert_close(ours.embed(tokens), theirs.embed(tokens), atol=0, rtol=0)


def test_a_head_on_a_subset(tmp_path: Path, write_model, runners) -> None:  # noqa: ANN001
    """A draft that reads all of the target's tokens and says some of them."""
    path = write_model(tmp_path, scale=1.0, tokenizer=False)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"][:37].clone()
    save_file(weights, file)
    save_file({"d2t": torch.arange(0, 74, 2)}, path / "draft_vocab.safetensors")
    batch = Batch.of([prompt_item(40, np.arange(300), np.arange(30, 40))])
    runner = runners.native(path)
    logits, expected = runner.run(batch)[0], runners.torch(path).run(batch)[0]
    assert logits.shape == (10, 37)
    torch.testing.assert_close(logits, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
    hidden = runner.run(batch, capture_layers=[1])[1][1]
    assert torch.equal(runner.model.head(hidden[30:]), logits)


@pytest.mark.parametrize("head_dim", [8, 32, 64])
def test_bf16_weights_are_near(head_dim: int, tmp_path: Path, write_model, runners) -> None:  # noqa: ANN001
    path = write_model(tmp_path, scale=1.0, tokenizer=False, head_dim=head_dim)
    ours = runners.native(path, torch.bfloat16, torch.bfloat16)
    batch = Batch.of([prompt_item(40, np.arange(300))])
    expected = runners.torch(path).run(batch)[0]
    torch.testing.assert_close(
        ours.run(batch)[0], expected, atol=0.05 * expected.abs().max().item(), rtol=0.05
    )
    # Arithmetic is fp32, but for pairs of bf16, so weights that bf16 holds exactly give what fp32 gives.
    level = "avx512" if ours.model.level == "avx512_bf16" else ""
    file = path / "model.safetensors"
    save_file({k: v.bfloat16().float() for k, v in load_file(file).items()}, file)
    exact = runners.native(path, torch.bfloat16, torch.float32, level).run(batch)[0]
    assert torch.equal(exact, runners.native(path, level=level).run(batch)[0])


def test_a_forward_waits_for_a_layer(tmp_path: Path, write_model, runners) -> None:  # noqa: ANN001
    """Another thread packs a layer's weights while the forward stands before it."""
    right, other = (write_model(tmp_path / str(seed), seed=seed, tokenizer=False) for seed in (0, 1))
    weights = load_file(other / "model.safetensors")
    kept = {n: w for n, w in load_file(right / "model.safetensors").items() if ".layers.1." not in n}
    save_file({**weights, **kept}, other / "model.safetensors")
    batch = Batch.of([prompt_item(40, np.arange(300))])
    expected = runners.native(right).run(batch)[0]
    runner = runners.native(other)
    assert not torch.equal(runner.run(batch)[0], expected)
    runner.model.withhold(1)
    with ThreadPoolExecutor(1) as thread:
        logits = thread.submit(runner.run, batch)
        try:
            runner.model.load_layer(open_checkpoint(right), 1)
        finally:
            runner.model.release(1)
        assert torch.equal(logits.result()[0], expected)
    with pytest.raises(ValueError, match="no layer 2"):
        runner.model.withhold(2)


def test_ranges_of_layers_add_up(tiny_model: Path, runners) -> None:  # noqa: ANN001
    runner = runners.native(tiny_model)
    batch = Batch.of([prompt_item(5, np.arange(300), np.array([4]))])
    logits, captured = runner.run(batch, capture_layers={0, 1})
    hidden = runner.model.embed(batch.token_ids)
    first, none = runner.run_layers(batch, hidden, range(1))
    second, rows = runner.run_layers(batch, first, range(1, 2), capture_layers={0, 1})
    assert not none and set(rows) == {1} and torch.equal(rows[1], second)
    assert torch.equal(first, captured[0]) and torch.equal(second, captured[1])
    assert torch.equal(runner.model.head(second[4:]), logits)
    with pytest.raises(ValueError, match="layers"):
        runner.run_layers(batch, hidden, range(1, 3))


def test_batches_at_the_edges(tiny_model: Path, runners) -> None:  # noqa: ANN001
    runner = runners.native(tiny_model)
    assert runner.run(Batch.of([prompt_item(3, np.arange(300), NONE)]))[0].shape == (0, 300)
    logits, captured = runner.run(
        Batch.of([WorkItem(Span(NONE, NONE, NONE), NONE, NONE)]), capture_layers=[1]
    )
    assert logits.shape == (0, 300) and captured[1].shape == (0, 32)
    assert runner.run(Batch((), NONE, NONE))[0].shape == (0, 300)
    empty = WorkItem(Span(np.arange(3), NONE, NONE), NONE, NONE)
    alone = runner.run(Batch.of([prompt_item(4, np.arange(10, 20))]))[0]
    assert torch.equal(runner.run(Batch.of([empty, prompt_item(4, np.arange(10, 20)), empty]))[0], alone)


def test_a_forked_child_works_alone(tiny_model: Path, runners) -> None:  # noqa: ANN001
    runner = runners.native(tiny_model, num_threads=2)
    batch = Batch.of([prompt_item(30, np.arange(300))])
    expected = runner.run(batch)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(runner.run(batch)[0], expected) else 1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (WorkItem(Span(NONE, np.array([401]), np.array([-1])), np.array([1]), NONE), "slot"),
        (WorkItem(Span(np.array([-1]), np.array([1]), np.array([-1])), np.array([1]), NONE), "slot"),
        (WorkItem(Span(NONE, np.array([1]), np.array([-1])), np.array([300]), NONE), "token id"),
        (WorkItem(Span(NONE, np.array([1]), np.array([-1])), np.array([1]), np.array([1])), "logits row"),
        (
            WorkItem(Span(np.zeros(512, np.int64), np.array([1]), np.array([-1])), np.array([1]), NONE),
            "position",
        ),
    ],
)
def test_nothing_is_read_outside(item: WorkItem, message: str, tiny_model: Path, runners) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        runners.native(tiny_model).run(Batch.of([item]))


@pytest.mark.parametrize("token", [-1, 300])
def test_no_token_outside_is_embedded(token: int, tiny_model: Path, runners) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match="token id"):
        runners.native(tiny_model).embed(np.array([0, token]))


def test_weights_that_do_not_fit(tmp_path: Path, write_model, runners) -> None:  # noqa: ANN001
    path = write_model(tmp_path, tokenizer=False)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 33)
    save_file(weights, file)
    with pytest.raises(ModelError, match="up is 64 x 33, not 64 x 32"):
        runners.native(path)


def test_level_variable(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {}
    for level in ("", *LEVELS, "off"):
        monkeypatch.setenv(native_module.VARIABLE, level)
        try:
            llm = LLM(str(tiny_model), dtype="float32")
        except ConfigError as error:
            assert f"this CPU has no {level}" in str(error) and error.hint
            continue
        runner = llm.engine.parts.runner
        assert isinstance(runner, ModelRunner if level == "off" else NativeRunner)
        if level not in ("", "off"):
            assert isinstance(runner, NativeRunner) and runner.model.level == level
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        tokens[level] = llm.generate(list(range(20)), params)[0].outputs[0].token_ids
    assert len(set(tokens.values())) == 1
    monkeypatch.setenv(native_module.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="sse9"):
        LLM(str(tiny_model))


def test_without_the_extension(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_module, "extension", lambda: None)
    monkeypatch.delenv(native_module.VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING, "specinfer"):
        llm = LLM(str(tiny_model), dtype="float32")
    assert isinstance(llm.engine.parts.runner, ModelRunner)
    assert [r.message for r in caplog.records if "not built" in r.message]
    monkeypatch.setenv(native_module.VARIABLE, "portable")
    with pytest.raises(ConfigError, match="not built"):
        LLM(str(tiny_model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", ["", "portable", "off"])
def test_every_path_is_lossless(
    level: str, dtype: Any, tiny_model: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native_module.VARIABLE, level)
    prompts = [[int(t) for t in np.random.default_rng(i).integers(0, 256, 5 + 9 * i)] for i in range(6)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40) for i in range(6)]
    plain = LLM(str(tiny_model), dtype=dtype).generate(prompts, params, progress=False)
    llm = LLM(str(tiny_model), drafts=[str(tiny_draft)], tree="3,2,1,1", dtype=dtype, max_num_seqs=3)
    for a, b in zip(plain, llm.generate(prompts, params, progress=False), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_torch_keeps_to_one_thread_during_a_step(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for level, seen in (("portable", 1), ("off", 2)):
            monkeypatch.setenv(native_module.VARIABLE, level)
            llm = LLM(str(tiny_model), dtype="float32")
            during = []
            run = llm.engine.parts.runner.run
            monkeypatch.setattr(
                llm.engine.parts.runner,
                "run",
                lambda *a, run=run, during=during: during.append(torch.get_num_threads()) or run(*a),
            )
            llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
            assert set(during) == {seen} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
