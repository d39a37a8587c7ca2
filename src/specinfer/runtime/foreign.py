"""ForeignRunner: a ModelRunner over transformers' own modelling code, slower and with no promise of bits."""

from __future__ import annotations

from collections.abc import Collection

import torch

from specinfer.attention import AttentionBackend
from specinfer.cache import KVPool
from specinfer.models.foreign import ForeignModel
from specinfer.runtime.batch import Batch


class ForeignRunner:
    """Runs whole forwards only: no ranges of layers, no captured rows."""

    keeps_bits = False

    def __init__(
        self, model: ForeignModel, pool: KVPool, attention: AttentionBackend, device: torch.device
    ) -> None:
        self.model = model
        self.pool = pool
        self._attention = attention
        self._device = device

    @torch.inference_mode()
    def run(
        self, batch: Batch, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As ModelRunner.run."""
        if capture_layers:
            raise self.model.refusal("hidden rows of its layers cannot be had")
        self._attention.plan(batch.spans)
        token_ids, positions, rows = (
            torch.from_numpy(array).to(self._device)
            for array in (batch.token_ids, batch.positions, batch.logits_rows)
        )
        return self.model.forward(token_ids, positions, rows), {}

    def run_layers(
        self, batch: Batch, hidden: torch.Tensor, layers: range, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Not to be had. Raises ModelError."""
        raise self.model.refusal("ranges of its layers cannot be run")
