"""The plain torch backend, CPU and CUDA: the reference of every other one.

In a token tree a token's keys, in position order, are the context and then its path. So tree attention is
causal attention along root-to-leaf paths: each leaf's keys are gathered through the slot table in position
order, and each token is a query of the first leaf below it. The mask is `key position <= query position`, and
with a sliding window `key position > query position - window`; whole chunks that no query sees are left out.

Bits (design.md 3). On CPU the sum over a query's keys must not depend on what else is in the batch:
- matrix products are batches of at least 2 items of a multiple of ROW_BLOCK rows, for which a row's bits do
  not depend on the number of rows or columns (smaller ones take other kernels);
- P @ V adds up KEY_CHUNK keys at a time, at fixed absolute positions, the tail padded with zero weights
  (one product over all keys is blocked by their number);
- bf16 K/V is widened to fp32, which is exact.
tests/attention/test_torch_backend.py checks this on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.attention.span import Span

ROW_BLOCK = 8
KEY_CHUNK = 128
LONG_PATH = 16
"""Paths with more queries than this are padded alone, shorter ones with those of about their length."""
MAX_PATHS = 64
"""Paths gathered at once, which bounds the memory of a step."""

Ints = NDArray[np.int64]
Path = tuple[Ints, Ints, Ints]
"""Query tokens, their positions among the path's keys, the slots of these keys."""


@dataclass(frozen=True)
class PathGroup:
    """Leaf paths padded to one shape: P paths, M query rows (query, then head of the group), L keys."""

    query_rows: torch.Tensor
    """[P * num_kv_heads * M] rows of q viewed as [num_tokens * num_heads, head_dim]."""
    key_rows: torch.Tensor
    """[P * num_kv_heads * L] rows of a pool viewed as [slots * num_kv_heads, head_dim]."""
    bias: torch.Tensor
    """[P, 1, M, L]: 0 where the key is seen, else -inf."""


@dataclass(frozen=True)
class Plan:
    """One forward's paths for the layers of one window."""

    groups: list[PathGroup]
    out_rows: torch.Tensor
    """[num_tokens * num_heads] rows of the groups' outputs, one after the other."""


class TorchAttention:
    """Tree attention with torch operations; see the module's docstring."""

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        num_heads: int,
        scale: float,
        null_slot: int,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """keys, values: per layer a pool [num_slots, num_kv_heads, head_dim]; null_slot is always zero.

        windows: per layer the last positions that a token sees, itself included; None for all.
        """
        self._keys, self._values = keys, values
        self._scale = scale
        self._num_heads = num_heads
        self._null_slot = null_slot
        self._num_kv_heads, self._head_dim = keys[0].shape[1:]
        self._device = keys[0].device
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._windows = tuple(windows or [None] * len(keys))
        self._plans: dict[int | None, Plan] = {}

    def plan(self, spans: Sequence[Span]) -> None:
        paths: list[Path] = []
        start = 0
        for span in spans:
            taken = np.zeros(span.num_tokens, np.bool_)
            for nodes in map(np.asarray, span.leaf_paths()):
                new = ~taken[nodes]
                taken[nodes] = True
                positions = len(span.context_slots) + np.flatnonzero(new)
                keys = np.concatenate([span.context_slots, span.slots[nodes]])
                paths.append((start + nodes[new], positions, keys))
            start += span.num_tokens
        self._slots = self._tensor(np.concatenate([span.slots for span in spans]))
        self._plans = {window: self._plan(paths, start, window) for window in set(self._windows)}

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        pool_k, pool_v = self._keys[layer], self._values[layer]
        plan = self._plans[self._windows[layer]]
        pool_k.index_copy_(0, self._slots, k)
        pool_v.index_copy_(0, self._slots, v)
        d = self._head_dim
        q_rows = q.reshape(-1, d)
        outputs = [
            self._attend(group, q_rows, pool_k.view(-1, d), pool_v.view(-1, d)) for group in plan.groups
        ]
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return rows.index_select(0, plan.out_rows).view(q.shape).to(q.dtype)

    def _attend(
        self, group: PathGroup, q: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor
    ) -> torch.Tensor:
        num_paths, _, m, length = group.bias.shape
        items, d = max(2, num_paths * self._num_kv_heads), self._head_dim
        query = q.index_select(0, group.query_rows).view(items, m, d).float()
        key = pool_k.index_select(0, group.key_rows).view(items, length, d).float()
        value = pool_v.index_select(0, group.key_rows).view(items, length, d).float()
        scores = torch.bmm(query, key.transpose(1, 2)).view(num_paths, -1, m, length)
        weights = torch.softmax(scores.mul_(self._scale).add_(group.bias), -1).view(items, m, length)
        out = torch.bmm(weights[:, :, :KEY_CHUNK], value[:, :KEY_CHUNK])
        for start in range(KEY_CHUNK, length, KEY_CHUNK):
            end = start + KEY_CHUNK
            out.baddbmm_(weights[:, :, start:end], value[:, start:end])
        return out.view(-1, d)

    def _plan(self, paths: Sequence[Path], num_tokens: int, window: int | None) -> Plan:
        by_length: dict[int, list[Path]] = {}
        for path in paths:
            path = recent(path, window)
            is_short = len(path[0]) <= LONG_PATH
            key = round_up(len(path[2]), KEY_CHUNK) if is_short else -len(by_length) - 1
            by_length.setdefault(key, []).append(path)
        out_rows = np.zeros((num_tokens, self._num_heads), np.int64)
        groups: list[PathGroup] = []
        first_row = 0
        for some in by_length.values():
            for i in range(0, len(some), MAX_PATHS):
                groups.append(self._plan_group(some[i : i + MAX_PATHS], window, first_row, out_rows))
                first_row += len(groups[-1].query_rows)
        return Plan(groups, self._tensor(out_rows.reshape(-1)))

    def _plan_group(
        self,
        paths: Sequence[Path],
        window: int | None,
        first_row: int,
        out_rows: Ints,
    ) -> PathGroup:
        """The padded group, its output from first_row on; out_rows gets the places of its tokens' rows."""
        heads = np.arange(self._num_kv_heads)
        group_size = self._num_heads // self._num_kv_heads
        m = round_up(max(len(p[0]) for p in paths) * group_size, ROW_BLOCK)
        length = round_up(max(len(p[2]) for p in paths), KEY_CHUNK)
        num_paths = len(paths)
        keys = np.full((num_paths, length), self._null_slot, np.int64)
        seen = np.zeros((num_paths, m), np.int64)  # row padding sees key 0, so that its softmax is finite
        tokens = np.zeros((num_paths, m // group_size + 1), np.int64)
        for i, (queries, positions, path_keys) in enumerate(paths):
            keys[i, : len(path_keys)] = path_keys
            seen[i, : len(queries) * group_size] = np.repeat(positions, group_size)
            tokens[i, : len(queries)] = queries
        row = np.arange(m)
        # [P, kv head, M]: row r of kv head h is query r // group_size, head h * group_size + r % group_size.
        query_rows = (
            tokens[:, None, row // group_size] * self._num_heads
            + heads[None, :, None] * group_size
            + (row % group_size)[None, None]
        )
        key_rows = keys[:, None] * self._num_kv_heads + heads[None, :, None]
        for i, (queries, _, _) in enumerate(paths):
            at = np.arange(len(queries))[:, None, None] * group_size + np.arange(group_size)[None, None]
            place = first_row + (i * self._num_kv_heads + heads)[None, :, None] * m + at
            out_rows[queries] = place.reshape(len(queries), -1)
        key, query = np.arange(length)[None, None], seen[:, :, None]
        is_seen = key <= query if window is None else (key <= query) & (key > query - window)
        bias = np.where(is_seen, np.float32(0), np.float32(-np.inf))
        if num_paths * self._num_kv_heads == 1:  # a batch of one item takes another kernel
            query_rows, key_rows = np.repeat(query_rows, 2, 1), np.repeat(key_rows, 2, 1)
        return PathGroup(
            self._tensor(query_rows.reshape(-1)),
            self._tensor(key_rows.reshape(-1)),
            self._tensor(bias[:, None]),
        )

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def recent(path: Path, window: int | None) -> Path:
    """The path without the whole chunks of keys that lie before its first query's window."""
    queries, positions, keys = path
    if window is None or not len(queries):
        return path
    start = max(0, int(positions.min()) - window + 1) // KEY_CHUNK * KEY_CHUNK
    return queries, positions - start, keys[start:]


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple
