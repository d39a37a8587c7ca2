"""The torch backend against a plain softmax, and its promise of bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.attention import Span, TorchAttention

SHAPES = [(9, 3, 64), (4, 2, 16), (4, 1, 8), (2, 1, 64), (8, 8, 32), (1, 1, 16)]
NUM_SLOTS = 400


class Setup:
    """A pool of random K/V and tokens with random q, k, v by (position, token) so that equal paths match."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = shape
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)
        self.context_k = self.random(300, self.num_kv_heads)
        self.context_v = self.random(300, self.num_kv_heads)

    def random(self, n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, self.head_dim, generator=self.generator).to(self.dtype)

    def backend(
        self, layout: np.random.Generator, window: int | None = None
    ) -> tuple[TorchAttention, np.ndarray]:
        """A backend over a freshly shuffled pool, and the slot order it is to be used in."""
        shape = (NUM_SLOTS + 1, self.num_kv_heads, self.head_dim)
        self.pool_k, self.pool_v = torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)
        backend = TorchAttention(
            [self.pool_k],
            [self.pool_v],
            num_heads=self.num_heads,
            scale=self.head_dim**-0.5,
            null_slot=NUM_SLOTS,
            windows=[window],
        )
        return backend, layout.permutation(NUM_SLOTS)

    def fill_context(self, slots: np.ndarray) -> None:
        index = torch.from_numpy(slots)
        self.pool_k[index] = self.context_k[: len(slots)]
        self.pool_v[index] = self.context_v[: len(slots)]


def reference(
    setup: Setup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context_len: int,
    parents: Sequence[int],
    window: int | None,
) -> torch.Tensor:
    """Each token's softmax over the last `window` of context, ancestors and itself, in fp64."""
    rows = []
    for token in range(len(parents)):
        path, node = [], token
        while node >= 0:
            path.append(node)
            node = parents[node]
        seen = slice(-(window or 10**6), None)
        keys = torch.cat([setup.context_k[:context_len], k[path[::-1]]])[seen].double()
        values = torch.cat([setup.context_v[:context_len], v[path[::-1]]])[seen].double()
        group = setup.num_heads // setup.num_kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        weights = torch.einsum("hd,lhd->hl", q[token].double(), keys).mul(setup.head_dim**-0.5).softmax(-1)
        rows.append(torch.einsum("hl,lhd->hd", weights, values))
    return torch.stack(rows)


trees = st.lists(st.integers(0, 10**6), min_size=1, max_size=20).map(
    lambda picks: [-1] + [pick % i for i, pick in enumerate(picks, 1)]
)
windows = st.sampled_from([None, None, 1, 3, 100, 128, 200])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@settings(max_examples=8)
@given(parents=trees, context_len=st.integers(0, 290), window=windows, seed=st.integers(0, 99))
def test_equals_softmax(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tolerance: float,
    parents: list[int],
    context_len: int,
    window: int | None,
    seed: int,
) -> None:
    setup = Setup(shape, dtype)
    backend, order = setup.backend(np.random.default_rng(seed), window)
    n = len(parents)
    context, slots = order[:context_len], order[context_len : context_len + n]
    setup.fill_context(context)
    q, k, v = setup.random(n, shape[0]), setup.random(n, shape[1]), setup.random(n, shape[1])
    backend.plan([Span(context, slots, np.array(parents))])
    out = backend.run(q, k, v, 0)
    expected = reference(setup, q, k, v, context_len, parents, window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8)
@given(
    parents=trees,
    context_len=st.integers(0, 280),
    window=windows,
    seed=st.integers(0, 99),
    companions=st.lists(st.integers(1, 40), max_size=3),
)
def test_bits_do_not_depend_on_the_batch(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    parents: list[int],
    context_len: int,
    window: int | None,
    seed: int,
    companions: list[int],
) -> None:
    """Every node of a tree, other requests beside it: the bits of its path fed one token at a time."""
    setup = Setup(shape, dtype)
    rng = np.random.default_rng(seed)
    n = len(parents)
    q, k, v = setup.random(n, shape[0]), setup.random(n, shape[1]), setup.random(n, shape[1])

    backend, order = setup.backend(rng, window)
    context, slots = order[:context_len], order[context_len : context_len + n]
    setup.fill_context(context)
    spans, extra = [Span(context, slots, np.array(parents))], 0
    for length in companions:
        start = context_len + n + extra
        room = min(length, NUM_SLOTS - start)
        if room > 0:
            spans.append(Span(order[:0], order[start : start + room], np.arange(-1, room - 1)))
            extra += room
    backend.plan(spans)
    together = backend.run(
        torch.cat([q, setup.random(extra, shape[0])]),
        torch.cat([k, setup.random(extra, shape[1])]),
        torch.cat([v, setup.random(extra, shape[1])]),
        0,
    )[:n]

    for leaf in set(range(n)) - set(parents):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        alone, order = setup.backend(rng, window)
        setup.fill_context(order[:context_len])
        for depth, token in enumerate(path[::-1]):
            seen = order[: context_len + depth]
            alone.plan([Span(seen, order[len(seen) : len(seen) + 1], np.array([-1]))])
            row = alone.run(q[token : token + 1], k[token : token + 1], v[token : token + 1], 0)
            assert torch.equal(row[0], together[token])
