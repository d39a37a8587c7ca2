"""Family: how the models of one `model_type` are read and built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specinfer.models.builder import Builder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.raw import RawConfig


@dataclass(frozen=True)
class Family:
    """prefix: of every weight's name but the head's; checkpoints of the bare model leave it out.

    layers: what the names of the layers' weights begin with. embedding: the name of the input embedding.
    """

    read_config: Callable[[RawConfig], ModelConfig]
    build: Callable[[Builder], Decoder]
    prefix: str
    layers: str
    embedding: str
