"""Quantised weights against numpy; what is kept in which type; the same tokens with and without drafts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer import LLM, SamplingParams
from specinfer.attention import Span
from specinfer.errors import ConfigError, ModelError
from specinfer.models.gguf import GGUFFile
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime import native as native_module
from specinfer.runtime.native import LEVELS, NativeRunner

NONE = np.zeros(0, np.int64)
KINDS = ["int8", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"]
WHOLE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # units of Q4_K
EPS = np.float32(1e-5)
Float = np.float32


class Weights:
    """Blocks of a kind, [rows, bytes], as integers, and a scale and a minimum a block, [rows, blocks]."""

    def __init__(self, kind: str, stored: np.ndarray) -> None:
        rows = len(stored)
        raw = stored.reshape(rows, -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1])
        halves = lambda x: np.ascontiguousarray(x).view(np.float16).astype(Float)  # noqa: E731
        minima = None
        if kind == "q8_0":
            scales, integers = halves(raw[..., :2]), raw[..., 2:].view(np.int8)
        elif kind == "q6_k":
            scales = halves(raw[..., 208:]) * raw[..., 192:208].view(np.int8).astype(Float)
            plain = raw.copy()  # all scales one
            plain[..., 192:208] = 1
            plain[..., 208:] = np.ones(1, np.float16).view(np.uint8)
            integers = gguf.dequantize(plain, gguf.GGMLQuantizationType.Q6_K)
        elif kind == "q4_k":
            numbers = halves(raw[..., :4])
            six = gguf.quants.Q4_K.get_scale_min(raw[..., 4:16].reshape(-1, 12))
            parts, multiples = (x.reshape(rows, -1, 8).astype(Float) for x in six)
            scales, minima = numbers[..., :1] * parts, -(numbers[..., 1:] * multiples)
            pairs = raw[..., 16:].reshape(rows, -1, 4, 1, 32)
            integers = np.concatenate([pairs & 15, pairs >> 4], -2)
        else:
            count = 2 if kind == "q4_1" else 1
            numbers, body = halves(raw[..., : 2 * count]), raw[..., 2 * count :]
            scales, minima = numbers[..., 0], numbers[..., 1] if kind == "q4_1" else None
            integers = np.concatenate([body & 15, body >> 4], -1).astype(int) - (8 if kind == "q4_0" else 0)
        self.integers = integers.reshape(rows, -1).astype(int)
        self.scales = scales.reshape(rows, -1)
        self.minima = np.zeros_like(self.scales) if minima is None else minima.reshape(rows, -1)
        self.block = self.integers.shape[1] // self.scales.shape[1]

    def times(self, row: np.ndarray) -> np.ndarray:
        """The definition: integer sums by block, added up in order in fp32."""
        result = np.zeros(len(self.integers), Float)
        for b in range(self.scales.shape[1]):
            inputs = slice(b * self.block, (b + 1) * self.block)
            size = np.abs(row[inputs]).max()
            scale = size / Float(127)
            q = np.rint(row[inputs] * (Float(127) / size)).astype(int)
            sums = self.integers[:, inputs] @ q
            result = result + sums.astype(Float) * (self.scales[:, b] * scale)
            result = result + self.minima[:, b] * (scale * Float(q.sum()))
        return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("vocab", "hidden"), [(300, 32), (33, 96), (16, 256), (1, 64)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_linear_equals_its_definition_to_the_bit(
    kind: str, level: str, vocab: int, hidden: int, tied: bool, tmp_path: Path, write_model: Any, runners: Any
) -> None:
    """On every level: only integer sums, and one order of additions. The embedding is the same weights."""
    hidden *= 8 if kind in ("q4_k", "q6_k") else 1
    path = write_model(
        tmp_path / "model", tokenizer=False, vocab_size=vocab, hidden_size=hidden, tie_word_embeddings=tied
    )
    model = runners.quantized(path, kind, level).model
    tensors = {name: t.float().numpy() for name, t in load_file(path / "model.safetensors").items()}
    kind = "q8_0" if kind == "int8" else kind
    embedding = runners.stored(tensors["model.embed_tokens.weight"], kind)
    values = gguf.dequantize(embedding, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(model.embed(np.arange(vocab)).numpy(), values)
    head = Weights(kind, embedding if tied else runners.stored(tensors["lm_head.weight"], kind))
    # Small integers, of which the norm is the same in any order of additions.
    rows = np.random.default_rng(0).integers(-9, 10, (40, hidden)).astype(Float)
    inverse = 1 / np.sqrt((rows * rows).sum(1, keepdims=True) / Float(hidden) + EPS)
    normed = rows * inverse * tensors["model.norm.weight"]
    logits = model.head(torch.from_numpy(rows)).numpy()
    assert np.array_equal(logits, np.stack([head.times(row) for row in normed]))
    for n in range(40):
        assert np.array_equal(model.head(torch.from_numpy(rows[:n])).numpy(), logits[:n])


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_torch_path(kind: str, tmp_path: Path, write_model: Any, runners: Any) -> None:
    """Rows alone are rounded more than there, so every projection has its right place."""
    biases = {"attention_bias": True, "mlp_bias": True}
    path = write_model(tmp_path / "model", scale=1.0, tokenizer=False, **WHOLE, **biases)
    ours = runners.quantized(path, kind)
    theirs = runners.torch(path if kind == "int8" else path.with_suffix(".gguf"))
    span = Span(NONE, np.arange(60), np.arange(-1, 59))
    batch = Batch.of([WorkItem(span, np.random.default_rng(0).integers(0, 300, 60), np.arange(60))])
    expected = theirs.run(batch)[0]
    difference = (ours.run(batch)[0] - expected).abs()
    assert difference.mean() < 0.03 * expected.abs().mean()


def test_zeros_and_what_is_no_number(tmp_path: Path, write_model: Any, runners: Any) -> None:
    path = write_model(tmp_path / "model", tokenizer=False)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][3] = 0
    save_file(weights, file)
    model = runners.quantized(path, "int8").model
    logits = model.head(torch.stack([torch.zeros(32), torch.ones(32)]))
    assert not logits[0].any() and torch.nonzero(logits[1] == 0).tolist() == [[3]]
    weights["lm_head.weight"][3, 4] = float("inf")
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"lm_head\.weight: a weight is not a number"):
        runners.quantized(path, "int8")
    stored = runners.as_gguf(write_model(tmp_path / "other", tokenizer=False), lambda _: "q4_1")
    blocks = GGUFFile(stored).blocks("model.layers.1.mlp.up_proj.weight").numpy().tobytes()
    assert (data := stored.read_bytes()).count(blocks) == 1
    stored.write_bytes(data.replace(blocks, b"\xff\x7f" + blocks[2:]))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight: a block's scale is not a number"):
        runners.native(stored, keep="stored")


def test_what_is_stored_otherwise_falls_back(tmp_path: Path, write_model: Any, runners: Any) -> None:
    """A linear whose parts differ, are of a type that is not multiplied or do not go into blocks, is kept in
    the dtype."""
    kinds = {"q_proj": "q8_0", "k_proj": "q4_0", "down_proj": "q5_0", "o_proj": "f16"}
    directory = write_model(tmp_path / "model", scale=1.0, tokenizer=False)
    path = runners.as_gguf(
        directory, lambda name: next((k for part, k in kinds.items() if part in name), "q4_1")
    )
    runner = runners.native(path, torch.bfloat16, keep="stored")
    assert runner.model.weight_types == ("bfloat16", "q4_1")
    item = WorkItem(Span(NONE, np.arange(20), np.arange(-1, 19)), np.arange(20), np.arange(20))
    expected = runners.torch(path).run(Batch.of([item]))[0]
    assert (runner.run(Batch.of([item]))[0] - expected).abs().mean() < 0.03 * expected.abs().mean()
    odd = write_model(tmp_path / "odd", tokenizer=False, intermediate_size=70)
    assert runners.quantized(odd, "int8").model.weight_types == ("q8_0", "bfloat16")


def test_parts_of_two_types(tmp_path: Path, write_model: Any, runners: Any) -> None:
    """As in Q4_K_M: v and what closes the feed-forward have more bits; v goes apart from q and k."""
    fine = ("v_proj", "down_proj", "embed_tokens")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}  # q and k end inside a panel
    directory = write_model(
        tmp_path / "model", scale=1.0, tokenizer=False, **{**WHOLE, **heads}, attention_bias=True
    )
    path = runners.as_gguf(directory, lambda name: "q6_k" if any(part in name for part in fine) else "q4_k")
    ours = runners.native(path, torch.bfloat16, torch.bfloat16, keep="stored")
    assert set(ours.model.weight_types) == {"q4_k", "q6_k", "bfloat16"}  # out's inputs are no whole unit
    tokens = np.random.default_rng(0).integers(0, 300, 40)
    batch = Batch.of([WorkItem(Span(NONE, np.arange(40), np.arange(-1, 39)), tokens, np.arange(40))])
    expected = runners.torch(path).run(batch)[0]
    logits = ours.run(batch)[0]
    assert (logits - expected).abs().mean() < 0.03 * expected.abs().mean()
    for i, token in enumerate(tokens[:9]):  # one at a time, the same bits
        span = Span(np.arange(i), np.arange(i, i + 1), np.array([-1]))
        alone = ours.run(Batch.of([WorkItem(span, np.array([token]), np.array([0]))]))[0]
        assert torch.equal(alone[0], logits[i])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_and_without_drafts(
    kind: str,
    tmp_path: Path,
    write_model: Any,
    tiny_draft: Path,
    runners: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_model(tmp_path / "model", tokenizer=False, **WHOLE)
    model = path if kind == "int8" else runners.as_gguf(path, lambda _: kind)
    settings: dict[str, Any] = {"quantize": "int8"} if kind == "int8" else {}
    prompts = [[int(t) for t in np.random.default_rng(i).integers(0, 256, 5 + 9 * i)] for i in range(4)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True) for i in range(4)]
    with caplog.at_level(logging.INFO, "specinfer"):
        plain = LLM(str(model), **settings)
    assert f" {'q8_0' if kind == 'int8' else kind}" in next(
        r.message for r in caplog.records if "memory" in r.message
    )
    llm = LLM(str(model), drafts=[str(tiny_draft)], tree="3,2,1", max_num_seqs=3, **settings)
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params, progress=False)]
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)] == expected
    if kind != "int8":
        runner = LLM(str(model), dtype="bfloat16").engine.parts.runner
        assert isinstance(runner, NativeRunner) and runner.model.weight_types == ("bfloat16",)


def test_quantize_that_cannot_be(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"quantize": "int4"}
    with pytest.raises(ConfigError, match="'int4'") as error:
        LLM(str(tiny_model), **settings)
    assert error.value.hint
    monkeypatch.setenv(native_module.VARIABLE, "off")
    with pytest.raises(ConfigError, match="needs the native forward: SPECINFER_CPU is off") as error:
        LLM(str(tiny_model), quantize="int8")
    assert error.value.hint
