"""Safetensors directories: single, sharded, and every way they are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specinfer.errors import ModelError
from specinfer.models.weights import PrefixedWeights, SafetensorsWeights

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "lm_head.weight": torch.full((4, 3), 0.5, dtype=torch.float16),
}


def write_shards(directory: Path) -> Path:
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def assert_holds_tensors(directory: Path) -> None:
    weights = SafetensorsWeights(directory)
    assert set(weights.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        read = weights.get(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds_tensors(tmp_path)


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert_holds_tensors(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp") as caught:
        SafetensorsWeights(tmp_path).get("model.layers.0.mlp.up_proj.weight")
    assert caught.value.hint


def test_integer_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"q.qweight": torch.ones(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="int32"):
        SafetensorsWeights(tmp_path).get("q.qweight")


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors.*not a whole") as caught:
        SafetensorsWeights(tmp_path)
    assert caught.value.hint


def test_garbage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<html>not found</html>" * 40)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        SafetensorsWeights(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors.*missing"):
        SafetensorsWeights(tmp_path)


def test_shard_without_its_tensor(tmp_path: Path) -> None:
    index = write_shards(tmp_path)
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"model\.extra"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
def test_bad_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsWeights(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        SafetensorsWeights(tmp_path)
    with pytest.raises(ModelError, match="no model directory"):
        SafetensorsWeights(tmp_path / "absent")


def test_names_of_the_bare_model(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = SafetensorsWeights(tmp_path)
    assert PrefixedWeights.of(whole, "model.") is whole
    bare = {name.removeprefix("model."): tensor for name, tensor in TENSORS.items()}
    save_file(bare, tmp_path / "model.safetensors")
    weights = PrefixedWeights.of(SafetensorsWeights(tmp_path), "model.")
    assert set(weights.names()) == set(TENSORS)
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in TENSORS.items())
