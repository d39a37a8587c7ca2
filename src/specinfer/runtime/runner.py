"""ModelRunner: one model, its K/V pool and its attention backend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from specinfer.attention import AttentionBackend, TorchAttention
from specinfer.cache import KVPool
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import Checkpoint, build_model
from specinfer.runtime.batch import Batch, Ints


class Runner(Protocol):
    """What the engine and the drafters see of a model in memory. See ModelRunner."""

    @property
    def pool(self) -> KVPool: ...

    @property
    def keeps_bits(self) -> bool:
        """Whether a row's bits depend on its own tokens alone."""
        ...

    def run(
        self, batch: Batch, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]: ...


class LayerRunner(Runner, Protocol):
    """A Runner of a model that is not one whole: rows can be had before, between and after its layers."""

    @property
    def config(self) -> ModelConfig: ...

    def embed(self, token_ids: Ints) -> torch.Tensor: ...

    def run(
        self, batch: Batch, capture_layers: Collection[int] = (), hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]: ...

    def run_layers(
        self, batch: Batch, hidden: torch.Tensor, layers: range, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]: ...


class ModelRunner:
    """Target and drafts are instances of this one class."""

    def __init__(
        self, model: Decoder, pool: KVPool, attention: AttentionBackend, device: torch.device
    ) -> None:
        self.model = model
        self.pool = pool
        self.keeps_bits = device.type == "cpu"
        self._attention = attention
        self._device = device

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    @torch.inference_mode()
    def embed(self, token_ids: Ints) -> torch.Tensor:
        """[n, hidden_size] rows before the first layer, of tokens at position 0."""
        ids = torch.from_numpy(token_ids).to(self._device)
        return self.model.embed(ids, torch.zeros_like(ids))

    @torch.inference_mode()
    def run(
        self, batch: Batch, capture_layers: Collection[int] = (), hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits [len(batch.logits_rows), vocab_size], and the hidden rows [num_tokens, hidden_size] after
        each layer of `capture_layers`. K/V goes to the spans' slots. hidden: rows to begin with, in place of
        the embedding's."""
        if hidden is None:
            positions = torch.from_numpy(batch.positions).to(self._device)
            hidden = self.model.embed(torch.from_numpy(batch.token_ids).to(self._device), positions)
        hidden = hidden.to(self.pool.k[0].dtype)
        hidden, captured = self.run_layers(batch, hidden, range(len(self.model.layers)), capture_layers)
        if not len(batch.logits_rows):
            return hidden.new_zeros((0, self.model.config.vocab_size)), captured
        rows = torch.from_numpy(batch.logits_rows).to(self._device)
        return self.model.head(hidden.index_select(0, rows)), captured

    @torch.inference_mode()
    def run_layers(
        self, batch: Batch, hidden: torch.Tensor, layers: range, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The hidden rows [num_tokens, hidden_size] after a range of layers, given those before it."""
        cos_sin = self.model.cos_sin(torch.from_numpy(batch.positions).to(self._device))
        self._attention.plan(batch.spans)
        captured: dict[int, torch.Tensor] = {}
        for i in layers:
            hidden = self.model.layers[i](hidden, cos_sin, self._attention)
            if i in capture_layers:
                captured[i] = hidden
        return hidden, captured


def make_pool(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device, num_scratch: int = 0
) -> KVPool:
    """A pool that fits a model."""
    return KVPool(
        num_layers=config.num_layers,
        num_slots=num_slots,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        num_scratch=num_scratch,
    )


def make_torch_runner(
    checkpoint: Checkpoint, factory: LinearFactory, pool: KVPool, max_position: int
) -> Runner:
    """Load a checkpoint's weights to run with torch. max_position: positions that will be used."""
    c = checkpoint.config
    attention = TorchAttention(
        pool.k,
        pool.v,
        num_heads=c.num_heads,
        scale=c.head_dim**-0.5,
        null_slot=pool.null_slot,
        windows=c.windows,
    )
    if checkpoint.is_foreign:
        from specinfer.models.foreign import ForeignModel  # takes seconds
        from specinfer.runtime.foreign import ForeignRunner

        foreign = ForeignModel(checkpoint.path, c, attention, factory.dtype, factory.device)
        factory.num_bytes += foreign.num_bytes
        return ForeignRunner(foreign, pool, attention, factory.device)
    return ModelRunner(build_model(checkpoint, factory, max_position), pool, attention, factory.device)
