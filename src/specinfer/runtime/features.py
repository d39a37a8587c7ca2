"""FeatureRunner: a draft that reads, beside each token, its target's last hidden row before it (EAGLE, Li et
al. 2024). The target's rows are kept as its K/V is: under the slots of their tokens, so that whatever a
request keeps, drops or shares with another, the rows go with it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from specinfer.attention import Span
from specinfer.cache import KVPool
from specinfer.cache.pool import zeros
from specinfer.errors import ModelError
from specinfer.models.weights import FEATURES
from specinfer.runtime.batch import Batch, Ints
from specinfer.runtime.runner import LayerRunner

EPS = 1e-6


class FeatureRunner:
    """Runs a draft on rows made from the target's embedding of a token and the target's last hidden row at
    the token before; below tokens that the target has not read, from the draft's own last row there."""

    keeps_bits = False

    def __init__(self, draft: LayerRunner, target: LayerRunner, weight: torch.Tensor | None) -> None:
        """weight: [hidden_size, 2 * hidden_size], of the embedding and the row before; None for a draft that
        has it and reads both. Raises ModelError."""
        self._draft, self._target = draft, target
        config = draft.config
        size = config.hidden_size
        k = draft.pool.k[0]
        self._weight: torch.Tensor | None = None
        if weight is not None:
            if tuple(weight.shape) != (size, 2 * size):
                raise ModelError(f"the draft's {FEATURES} is {tuple(weight.shape)}, not {(size, 2 * size)}")
            self._weight = weight.to(k.device, torch.float32 if k.device.type == "cpu" else k.dtype)
        self._last_layer = config.num_layers - 1
        self.target_layer = target.config.num_layers - 1
        self._rows = _Rows(k.shape[0], size, rows_dtype(k.dtype, k.device), k.device)
        self._own: tuple[Ints, torch.Tensor] | None = None

    @property
    def pool(self) -> KVPool:
        """The draft's."""
        return self._draft.pool

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return self._rows.num_bytes

    def store(self, batch: Batch, rows: torch.Tensor) -> None:
        """Keep the target's hidden rows [num_tokens, hidden_size] after `target_layer` of a batch it ran; the
        draft's own below them are done with."""
        self._rows.put(batch.slots, rows)
        self._own = None

    @torch.inference_mode()
    def run(
        self, batch: Batch, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As ModelRunner.run, for token ids of the target's."""
        self._put_own()
        rows = self._rows.get(np.concatenate([self._slots_before(span) for span in batch.spans]))
        embedded = self._target.embed(batch.token_ids)
        if self._weight is None:
            hidden = torch.cat([embedded.float(), rows.float()], dim=-1)
        else:
            read = read_rows(embedded, rows).to(self._weight.dtype)
            hidden = torch.nn.functional.linear(read, self._weight)
        last = self._last_layer
        logits, captured = self._draft.run(batch, {last, *capture_layers}, hidden=hidden)
        self._own = batch.slots, captured[last]
        return logits, captured

    def _put_own(self) -> None:
        """Keep the draft's own rows of its last forward where the target has none. That is left to the next
        forward: below a tree's last depth nothing reads them."""
        if self._own is None:
            return
        (slots, rows), self._own = self._own, None
        own = np.flatnonzero(slots >= self.pool.scratch_start)
        if len(own):
            self._rows.put(slots[own], rows[torch.from_numpy(own).to(rows.device)])

    def _slots_before(self, span: Span) -> Ints:
        """[num_tokens] where each token's row before it is. In a trunk that the target has not read either
        there is none yet: its tokens have the last one known."""
        first = span.context_slots[-1] if len(span.context_slots) else self.pool.null_slot
        if span.num_tokens == 1:
            return np.array([first], np.int64)
        before = np.where(span.parents >= 0, span.slots[span.parents], first)
        for i in np.flatnonzero((span.parents >= 0) & (before >= self.pool.scratch_start)):
            before[i] = before[span.parents[i]]
        return before


class _Rows:
    """A row for each slot. On a CPU numpy reads and writes them: after a forward, which empties the caches,
    that takes 40 us, torch's indexing 100."""

    def __init__(self, num_slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = zeros((num_slots, size), dtype, device)
        self._host = self._rows.numpy() if device.type == "cpu" else None

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    def put(self, slots: Ints, rows: torch.Tensor) -> None:
        """rows: [len(slots), size]."""
        if self._host is not None:
            self._host[slots] = rows.float().numpy()
        else:
            self._rows[torch.from_numpy(slots).to(rows.device)] = rows.to(self._rows.dtype)

    def get(self, slots: Ints) -> torch.Tensor:
        """[len(slots), size]."""
        if self._host is not None:
            return torch.from_numpy(self._host[slots])
        return self._rows[torch.from_numpy(slots).to(self._rows.device)]


def rows_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the rows kept beside K/V of `dtype`: what numpy has, on a CPU."""
    return torch.float32 if device.type == "cpu" else dtype


def read_rows(embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[..., hidden_size] each -> [..., 2 * hidden_size] in fp32, what `features.weight` is applied to."""
    return torch.cat([unit_rows(embedded), unit_rows(before)], dim=-1)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows with a root mean square of 1, in fp32; 0 stays 0."""
    rows = rows.float()
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + EPS)
