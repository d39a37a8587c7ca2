"""`.bin` checkpoints: whole, sharded, old and new format, and never a line of their code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from specinfer.errors import ModelError
from specinfer.models.pickled import PickledWeights

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "lm_head.weight": torch.full((4, 3), 0.5, dtype=torch.float16),
}


def assert_holds_tensors(directory: Path) -> None:
    weights = PickledWeights(directory)
    assert set(weights.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert weights.get(name).dtype == tensor.dtype
        assert torch.equal(weights.get(name), tensor)


def write_shards(directory: Path) -> Path:
    names = list(TENSORS)
    shards = {"pytorch_model-00001-of-00002.bin": names[:2], "pytorch_model-00002-of-00002.bin": names[2:]}
    for file, held in shards.items():
        torch.save({name: TENSORS[name] for name in held}, directory / file)
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {n: file for file, held in shards.items() for n in held}}))
    return directory / "pytorch_model-00002-of-00002.bin"


@pytest.mark.parametrize("is_zip", [True, False])
def test_single_file(tmp_path: Path, is_zip: bool) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert_holds_tensors(tmp_path)
    with pytest.raises(ModelError, match="no tensor 'absent'"):
        PickledWeights(tmp_path).get("absent")


def test_parameters_come_without_gradients(tmp_path: Path) -> None:
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, tmp_path / "pytorch_model.bin")
    assert not PickledWeights(tmp_path).get("a").requires_grad


def test_shards(tmp_path: Path) -> None:
    last = write_shards(tmp_path)
    assert_holds_tensors(tmp_path)
    last.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002\.bin, which is missing"):
        PickledWeights(tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


def test_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read as plain tensors") as caught:
        PickledWeights(tmp_path)
    assert caught.value.hint and "safetensors" in caught.value.hint
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content", [b"", b"pickle", pickle.dumps([1, 2], 2)], ids=["empty", "garbage", "list"]
)
def test_what_holds_no_tensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        PickledWeights(tmp_path)


@pytest.mark.parametrize("keep", [10, 200, -30])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        PickledWeights(tmp_path)


def test_integer_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"q.qweight": torch.ones(2, dtype=torch.int32)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="int32"):
        PickledWeights(tmp_path).get("q.qweight")
