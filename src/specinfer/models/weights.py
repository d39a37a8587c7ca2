"""Where the tensors of a checkpoint come from: one protocol, and the safetensors kind of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from specinfer.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FEATURES = "features.weight"
"""Of a feature draft: from a token's embedding and its target's last row before it to its own first row."""


class WeightSource(Protocol):
    """Tensors by their Hugging Face name, read one at a time."""

    def names(self) -> Collection[str]:
        """Every tensor this source has. Testing membership is cheap."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the shape Hugging Face gives it: fp32, bf16 or fp16.

        Raises ModelError if there is no such tensor or it cannot be read.
        """
        ...


def take(weights: WeightSource, name: str, *shape: int) -> torch.Tensor:
    """A tensor of the shape that the config gives it. Raises ModelError."""
    tensor = weights.get(name)
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{name} has shape {tuple(tensor.shape)}, the config makes it {shape}",
            hint="check that config and weights belong to the same model",
        )
    return tensor


def find(weights: WeightSource, name: str, *shape: int) -> torch.Tensor | None:
    """`take`, or None where the checkpoint has no such tensor."""
    return take(weights, name, *shape) if name in weights.names() else None


def missing_tensor(name: str, where: Path) -> ModelError:
    """The error for a tensor that the model needs and the checkpoint lacks."""
    return ModelError(
        f"{where} has no tensor {name!r}",
        hint="the configuration and the weights disagree: check that both belong to the same model",
    )


def check_dtype(tensor: torch.Tensor, name: str, where: Path) -> None:
    """Raises ModelError unless the tensor holds fp32, bf16 or fp16."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(
            f"tensor {name!r} of {where} is stored as {tensor.dtype}",
            hint="fp32, bf16 and fp16 are read: use an unquantised checkpoint or a GGUF file",
        )


def read_index(path: Path, open_shard: Callable[[str], Collection[str]]) -> dict[str, str]:
    """Tensor name to file of a sharded checkpoint. Raises ModelError unless every file holds what it should.

    path: of the index. open_shard: the names in a file beside it.
    """
    hint = "fetch the index and every shard it names again"
    try:
        file_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in file_of.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not an index of shards: {error}", hint=hint) from error
    if not file_of:
        raise ModelError(f"{path} names no tensors", hint=hint)
    for file in sorted(set(file_of.values())):
        if Path(file).name != file:
            raise ModelError(f"{path} names {file!r}, which is not a file beside it", hint=hint)
        if not (path.parent / file).is_file():
            raise ModelError(f"{path} names {file}, which is missing from {path.parent}", hint=hint)
        present = set(open_shard(file))
        absent = [name for name, where in file_of.items() if where == file and name not in present]
        if absent:
            raise ModelError(f"{path} says that {file} holds {absent[0]!r}, but it does not", hint=hint)
    return file_of


class PrefixedWeights:
    """A checkpoint of the bare model, whose names lack the prefix that they have in the whole one."""

    def __init__(self, weights: WeightSource, prefix: str) -> None:
        self._weights = weights
        self._name_of = {
            name if name.startswith("lm_head.") else prefix + name: name for name in weights.names()
        }

    @staticmethod
    def of(weights: WeightSource, prefix: str) -> WeightSource:
        """The weights under the whole model's names, whichever they have."""
        is_whole = any(name.startswith(prefix) for name in weights.names())
        return weights if is_whole else PrefixedWeights(weights, prefix)

    def names(self) -> Collection[str]:
        return self._name_of.keys()

    def get(self, name: str) -> torch.Tensor:
        return self._weights.get(self._name_of.get(name, name))


class SafetensorsWeights:
    """The weights of a Hugging Face directory, `model.safetensors` or sharded by its index.

    Files are memory-mapped, each time anew: a tensor is read when it is asked for, and what was read goes
    with the tensor. Every file is opened once at first, so that a missing, corrupt or truncated one is
    found before any work is done (ModelError).
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if (self.directory / SINGLE_FILE).is_file():
            names = self._open(SINGLE_FILE)
            self._file_of = dict.fromkeys(names, SINGLE_FILE)
        elif (self.directory / INDEX_FILE).is_file():
            self._file_of = read_index(self.directory / INDEX_FILE, self._open)
        else:
            raise self._no_weights()

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether a directory holds such a checkpoint."""
        return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def get(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise missing_tensor(name, self.directory)
        file = self._file_of[name]
        try:
            with safe_open(self.directory / file, framework="pt", device="cpu") as shard:
                tensor: torch.Tensor = shard.get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ModelError(
                f"cannot read tensor {name!r} of {self.directory / file}: {error}",
                hint="the file is damaged or of a kind safetensors does not know: fetch it again",
            ) from error
        check_dtype(tensor, name, self.directory / file)
        return tensor

    def _open(self, file: str) -> list[str]:
        """Opens one file, checks its header against its size, and returns its tensor names."""
        path = self.directory / file
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                return [str(name) for name in shard.keys()]  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"{path} is not a whole safetensors file: {error}",
                hint="the file is corrupt or was cut short: delete it and fetch it again",
            ) from error

    def _no_weights(self) -> ModelError:
        if not self.directory.is_dir():
            return ModelError(f"there is no model directory {self.directory}", hint="check the path")
        return ModelError(
            f"{self.directory} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            hint="a model directory holds config.json and safetensors weights; name a GGUF file by its path",
        )
