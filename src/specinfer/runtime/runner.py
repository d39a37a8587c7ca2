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
from specinfer.runtime.features import FeatureReader


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
        self._reader: FeatureReader | None = None
        self._kept: list[torch.Tensor] = []

    def read_features(self, target: ModelRunner, weight: torch.Tensor) -> None:
        """Of a feature draft: see FeatureReader. The target keeps its last hidden rows in this one's pool."""
        self._reader = FeatureReader(self.pool, target.embed, weight)
        target._kept.append(self._reader.rows)

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
        self, batch: Batch, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits [len(batch.logits_rows), vocab_size], and the hidden rows [num_tokens, hidden_size] after
        each layer of `capture_layers`. K/V goes to the spans' slots."""
        if self._reader is not None:
            hidden = self._reader.read(batch)
        else:
            positions = torch.from_numpy(batch.positions).to(self._device)
            hidden = self.model.embed(torch.from_numpy(batch.token_ids).to(self._device), positions)
        hidden = hidden.to(self.pool.k[0].dtype)
        hidden, captured = self.run_layers(batch, hidden, range(len(self.model.layers)), capture_layers)
        for rows in self._kept:
            rows[torch.from_numpy(batch.slots).to(self._device)] = hidden.to(rows.dtype)
        if self._reader is not None:
            self._reader.keep_own(batch, hidden)
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
    config: ModelConfig,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    num_scratch: int = 0,
    *,
    reads_features: bool = False,
) -> KVPool:
    """A pool that fits a model. reads_features: of a target, whose rows are kept there."""
    return KVPool(
        num_layers=config.num_layers,
        num_slots=num_slots,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        num_scratch=num_scratch,
        row_size=config.hidden_size if reads_features else 0,
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
