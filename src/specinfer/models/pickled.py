"""`.bin` checkpoints, read only by torch's weights-only unpickler: no code of theirs runs."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from specinfer.errors import ModelError
from specinfer.models.weights import check_dtype, missing_tensor, read_index

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"


class PickledWeights:
    """The WeightSource of a directory with pytorch_model.bin, whole or sharded by its index.

    Files are memory-mapped where their format allows it (torch 1.6 and later). Every file is opened at once,
    so that a missing, corrupt or unsafe one is found before any work is done (ModelError).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tensors: dict[str, torch.Tensor] = {}
        if (directory / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE), SINGLE_FILE)
        else:
            self._file_of = read_index(directory / INDEX_FILE, self._open)

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether a directory holds such a checkpoint."""
        return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def get(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise missing_tensor(name, self.directory)
        tensor = self._tensors[name]
        check_dtype(tensor, name, self.directory / self._file_of[name])
        return tensor.detach()

    def _open(self, file: str) -> list[str]:
        path = self.directory / file
        try:
            state: Any = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise ModelError(
                f"{path} cannot be read as plain tensors ({type(error).__name__})",
                hint="it is damaged or holds more than tensors: fetch it again, or convert it to safetensors",
            ) from error
        if not isinstance(state, Mapping):
            raise ModelError(f"{path} does not hold tensors by name")
        found = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self._tensors |= found
        return list(found)
