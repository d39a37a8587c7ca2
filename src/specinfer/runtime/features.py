"""What a feature draft reads: beside each token its target's last hidden row before it (EAGLE, Li et al.
2024). The rows are kept as K/V is: under the slots of their tokens, so that whatever a request keeps, drops
or shares with another, the rows go with it. For the torch path; the native forward does it by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specinfer.attention import Span
from specinfer.cache import KVPool
from specinfer.errors import ModelError
from specinfer.models.weights import FEATURES
from specinfer.runtime.batch import Batch, Ints

EPS = 1e-6


class FeatureReader:
    """Makes a draft's rows of its target's embedding of each token and the target's last hidden row at the
    token before; below tokens that the target has not read, the draft's own last row there."""

    def __init__(self, pool: KVPool, embed: Callable[[Ints], torch.Tensor], weight: torch.Tensor) -> None:
        """pool: the draft's; embed: the target's. weight: [hidden_size, 2 * hidden_size], of the embedding
        and the row before. Raises ModelError."""
        assert pool.rows is not None
        self.rows = pool.rows
        size = pool.rows.shape[1]
        if tuple(weight.shape) != (size, 2 * size):
            raise ModelError(f"the draft's {FEATURES} is {tuple(weight.shape)}, not {(size, 2 * size)}")
        self._weight = weight.to(pool.rows.device, pool.rows.dtype)
        self._pool = pool
        self._embed = embed

    def read(self, batch: Batch) -> torch.Tensor:
        """[num_tokens, hidden_size] rows before the draft's first layer, of the target's tokens."""
        slots = np.concatenate([self._slots_before(span) for span in batch.spans])
        before = self.rows[torch.from_numpy(slots).to(self.rows.device)]
        read = read_rows(self._embed(batch.token_ids), before).to(self._weight.dtype)
        return torch.nn.functional.linear(read, self._weight)

    def keep_own(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Keep the draft's own last rows [num_tokens, hidden_size] where the target has none."""
        own = torch.from_numpy(np.flatnonzero(batch.slots >= self._pool.scratch_start))
        slots = torch.from_numpy(batch.slots)[own]
        self.rows[slots.to(self.rows.device)] = hidden[own.to(hidden.device)].to(self.rows.dtype)

    def _slots_before(self, span: Span) -> Ints:
        """[num_tokens] where each token's row before it is. In a trunk that the target has not read either
        there is none yet: its tokens have the last one known."""
        first = span.context_slots[-1] if len(span.context_slots) else self._pool.null_slot
        before = np.where(span.parents >= 0, span.slots[span.parents], first)
        for i in np.flatnonzero((span.parents >= 0) & (before >= self._pool.scratch_start)):
            before[i] = before[span.parents[i]]
        return before


def read_rows(embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[..., hidden_size] each -> [..., 2 * hidden_size] in fp32, what `features.weight` is applied to."""
    return torch.cat([unit_rows(embedded), unit_rows(before)], dim=-1)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows with a root mean square of 1, in fp32; 0 stays 0."""
    rows = rows.float()
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + EPS)
