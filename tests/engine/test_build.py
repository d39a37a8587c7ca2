"""Bad settings: the right error, with the thing's name in it, before a weight is read."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specinfer import (
    LLM,
    Chain,
    ConfigError,
    EngineConfig,
    Expansion,
    ModelError,
    SamplingParams,
    SpecinferError,
)
from specinfer.models.weights import SafetensorsWeights
from specinfer.runtime.native import NativeRunner
from specinfer.sampling import noise
from specinfer.tree import Level


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: SafetensorsWeights, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(SafetensorsWeights, "get", get)


def changed(source: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a model directory with other values in its config."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def refused(kind: type[SpecinferError], *words: str, model: Any, **settings: Any) -> SpecinferError:
    with pytest.raises(SpecinferError) as error:
        LLM(model, **settings)
    assert type(error.value) is kind
    for word in words:
        assert word in str(error.value)
    assert "\n" not in error.value.message
    return error.value


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"verifier": "nope"}, ["'nope'", "coupled", "multi_step", "without_replacement"]),
        ({"dtype": "int4"}, ["dtype 'int4'", "bfloat16", "float32"]),
        ({"device": "gpu"}, ["'gpu'", "cpu"]),
        ({"device": "meta"}, ["'meta'", "cpu"]),
        ({"device": ""}, ["device ''"]),
        ({"tree": "0"}, ["positive widths", "[0]"]),
        ({"tree": "3,0,1"}, ["positive widths"]),
        ({"tree": "-1"}, ["positive widths"]),
        ({"tree": "a,b"}, ["'a,b'", "3,2,1,1"]),
        ({"tree": ""}, ["''", "3,2,1,1"]),
        ({"tree": "3,,1"}, ["'3,,1'"]),
        ({"tree": "2.5"}, ["'2.5'"]),
        ({"tree": "9999"}, ["10000 nodes", "1024"]),
        ({"tree": "10,10,10,9"}, ["10111 nodes", "1024"]),
        ({"tree": ",".join(["1"] * 1024)}, ["1025 nodes", "1024"]),
        ({"tree": 3}, ["tree must be text or a Topology", "got 3"]),
        ({"tree": [3, 2]}, ["tree must be text or a Topology", "[3, 2]"]),
        ({"tree": None}, ["tree must be text or a Topology"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "positive"]),
        ({"max_step_tokens": -1}, ["max_step_tokens", "positive"]),
        ({"max_model_len": 0}, ["max_model_len", "positive"]),
        ({"max_model_len": 1.5}, ["max_model_len", "1.5"]),
        ({"kv_memory": 0}, ["kv_memory", "positive"]),
        ({"max_model_len": 513}, ["max_model_len is 513", "made for 512"]),
        ({"kv_memory": 300, "dtype": "float32"}, ["kv_memory of 300 bytes", "256 bytes"]),
        ({"drafts": ["default"]}, ["no draft ships for"]),
    ],
    ids=str,
)
def test_bad_settings(tiny_model: Path, settings: dict[str, Any], words: list[str]) -> None:
    refused(ConfigError, *words, model=str(tiny_model), **settings)


def test_more_than_the_memory(tiny_model: Path) -> None:
    words = "16777216.0 GiB of K/V", "do not fit the memory of cpu", "lower max_model_len or kv_memory"
    refused(ConfigError, *words, model=str(tiny_model), kv_memory=2**54)


def test_bad_trees_as_objects() -> None:
    for make, words in [
        (lambda: Chain(0), "at least 1"),
        (lambda: Chain(10_000), "at most 1023"),
        (lambda: Expansion(), "positive widths"),
        (lambda: Expansion(9999), "10000 nodes"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make()
    with pytest.raises(ConfigError, match="model must be"):
        EngineConfig(model="")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.usefixtures("no_weights")
def test_no_cuda(tiny_model: Path) -> None:
    refused(ConfigError, "device cuda", "none", "use cpu or auto", model=str(tiny_model), device="cuda")


@pytest.mark.usefixtures("no_weights")
def test_bad_models(tiny_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    refused(ModelError, str(missing), model=str(missing))
    refused(ModelError, "no config.json", str(tmp_path), model=str(tmp_path))
    other = changed(tiny_model, tmp_path / "t5", model_type="t5")
    refused(ModelError, "'t5' is not supported", "no decoder", model=str(other))
    quantised = changed(tiny_model, tmp_path / "awq", quantization_config={"quant_method": "awq"})
    refused(ModelError, "quantised safetensors", "GGUF", model=str(quantised))
    for name, content in [("garbage", b"\x07" * 100), ("empty", b""), ("truncated", None)]:
        directory = Path(shutil.copytree(tiny_model, tmp_path / name))
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100] if content is None else content)
        refused(ModelError, str(path), model=str(directory))
        refused(ModelError, str(path), model=str(tiny_model), drafts=[str(directory)])
    broken = changed(tiny_model, tmp_path / "json")
    (broken / "config.json").write_text("{")
    refused(ModelError, "config.json", "JSON", model=str(broken))
    refused(ModelError, str(missing), model=str(tiny_model), drafts=["ngram", str(missing)])


def test_weights_that_do_not_fit_the_config(tiny_model: Path, tmp_path: Path) -> None:
    wrong = changed(tiny_model, tmp_path / "wrong", num_hidden_layers=3)
    refused(ModelError, "model.layers.2", str(wrong), model=str(wrong))


@pytest.mark.usefixtures("no_weights")
def test_a_draft_whose_vocabulary_differs(tiny_model: Path, tiny_draft: Path, tmp_path: Path) -> None:
    """By sizes that no padding explains (tokenizers are compared in tests/draft/test_pairing.py)."""
    target = str(tiny_model)
    small = changed(tiny_draft, tmp_path / "small", vocab_size=299)
    refused(ConfigError, str(small), "299 tokens", "(300)", "ngram", model=target, drafts=[str(small)])
    # Without any tokenizer to go by, only the same size will do.
    wide = changed(tiny_draft, tmp_path / "wide", vocab_size=320)
    refused(ConfigError, str(wide), "320 tokens", model=str(tiny_draft), drafts=[str(wide)])


@pytest.mark.usefixtures("no_weights")
def test_a_draft_vocabulary_of_another_target(write_model: Any, other_draft: Path, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", vocab_size=260)
    refused(ConfigError, str(other_draft), "of 260", model=str(small), drafts=[str(other_draft)])


class Widening:
    """A topology of a user's own: one child, then two, more below likely paths."""

    max_depth = 3
    num_nodes = 1 + 1 + 2 + 6

    def __init__(self) -> None:
        self.levels: list[Level] = []

    def expand(self, level: Level) -> np.ndarray:
        self.levels.append(level)
        return np.where(level.scores > 0.2, level.depth + 1, 1)


def test_a_topology_of_ones_own(tiny_model: Path, tiny_draft: Path) -> None:
    """Asked once per depth for the whole batch; its trees change no token."""
    topology = Widening()
    llm = LLM(str(tiny_model), drafts=[str(tiny_draft)], tree=topology, dtype="float32", max_num_seqs=4)
    prompts = [[i, 7, 9] for i in range(4)]
    params = SamplingParams(seed=1, max_tokens=16, ignore_eos=True)
    got = llm.generate(prompts, params)
    plain = LLM(str(tiny_model), dtype="float32").generate(prompts, params)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plain]
    first = topology.levels[0]
    assert first.request.tolist() == [0, 1, 2, 3]
    assert first.scores.tolist() == [1.0] * 4
    depths = [level.depth for level in topology.levels]
    assert all(b in (0, a + 1) for a, b in zip(depths, depths[1:], strict=False))
    assert max(depths) == 2


@pytest.mark.parametrize("drafts", [[], ["draft"], ["draft", "ngram"]])
def test_no_noise_row_is_made_twice(
    tiny_model: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, drafts: list[str]
) -> None:
    """The noise cache holds what a full batch needs from draft to verification, and on to the next step. The
    extension's choices need no rows: here the target takes them from the cache, as it does without one."""
    monkeypatch.setattr("specinfer.sampling.chooser.native", None)
    made: list[Any] = []
    fill = noise._fill_on_cpu

    def counted(keys: Any, *rest: Any) -> None:
        made.extend(keys)
        fill(keys, *rest)

    monkeypatch.setattr(noise, "_fill_on_cpu", counted)
    names = [str(tiny_draft) if d == "draft" else d for d in drafts]
    llm = LLM(str(tiny_model), drafts=names, tree="1,1,1,1,1,1", dtype="float32", max_num_seqs=64)
    llm.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=10, n=64, ignore_eos=True))
    assert len(made) == len(set(made)) == 64 * 10


def test_one_line_says_how_a_draft_speaks(
    tiny_model: Path, tiny_draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = str(tiny_draft)
    with caplog.at_level(logging.INFO, logger="specinfer"):
        LLM(str(tiny_model), drafts=[draft, draft, "ngram", str(tiny_model)], dtype="float32")
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("draft ")]
    assert len(lines) == 2
    assert f"draft {tiny_model}: the target's tokenizer, 6 of 6 texts split alike" in lines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_one_table_says_what_memory_is_taken(
    tiny_model: Path, tiny_draft: Path, caplog: pytest.LogCaptureFixture, dtype: Any
) -> None:
    """A draft is kept in 8 bits unless all is asked for in full."""
    with caplog.at_level(logging.INFO, logger="specinfer"):
        llm = LLM(str(tiny_model), drafts=[str(tiny_draft), "ngram"], dtype=dtype, kv_memory=512 * 1000)
    (record,) = [r for r in caplog.records if "memory" in r.message]
    lines = record.message.splitlines()
    assert len(lines) == 4  # a title, a head, two models
    assert f"{llm.engine.allocator.num_slots} slots" in lines[1]
    _, _, target, draft = (line.split()[-1] for line in lines)
    kept = str(llm.engine.parts.runner.pool.k[0].dtype).removeprefix("torch.")
    is_native = isinstance(llm.engine.parts.runner, NativeRunner)
    assert (target, draft) == (kept, "q8_0" if is_native and dtype != "float32" else kept)


def test_a_draft_vocabulary_of_another_length_than_the_head(
    tiny_model: Path, tmp_path: Path, write_model: Any
) -> None:
    draft = write_model(tmp_path / "draft", tokenizer=False, vocab_size=200)
    save_file({"d2t": torch.arange(150, dtype=torch.int32)}, str(draft / "draft_vocab.safetensors"))
    with pytest.raises(
        ModelError, match=r"head is 200 x 32, not 150 x 32|\(200, 32\), the config makes it \(150"
    ):
        LLM(str(tiny_model), drafts=[str(draft)])


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": 999},
        {"num_hidden_layers": 1},
        {"vocab_size": 280},
        {"hidden_size": 64},
        {"num_attention_heads": 2},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_its_weights(
    tiny_model: Path, tmp_path: Path, change: dict[str, int]
) -> None:
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match="the config") as error:
        LLM(str(directory))
    assert error.value.hint
