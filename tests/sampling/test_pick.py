"""What a draft picks: the top of a perturbed row, and draws from q that follow q."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specinfer.sampling import Purpose, draw_iid, draw_without_replacement, pick_top, stream
from specinfer.sampling.pick import _pick, _pick_on_device

values = st.sampled_from([-math.inf, -2.0, 0.0, 0.5, 0.5, 1.0, 3.0])


rows_of_one_width = st.integers(1, 12).flatmap(
    lambda width: st.lists(st.lists(values, min_size=width, max_size=width), max_size=5)
)


def pick_by_numpy(perturbed, counts):
    return [_pick(row, count) for row, count in zip(perturbed.numpy(), counts, strict=True)]


@pytest.mark.parametrize("pick", [pick_top, pick_by_numpy, _pick_on_device])
@given(rows=rows_of_one_width, data=st.data())
def test_the_top_columns_lowest_first_among_equals(pick, rows, data):
    rows = [[0.0, *row] for row in rows]  # a row always has a token that survives
    counts = [data.draw(st.integers(0, 14)) for _ in rows]
    perturbed = torch.tensor(rows) if rows else torch.zeros(0, 3)
    picked = pick(perturbed, counts)
    assert len(picked) == len(rows)
    for row, count, (columns, scores) in zip(rows, counts, picked, strict=True):
        order = sorted((i for i, x in enumerate(row) if x > -math.inf), key=lambda i: (-row[i], i))
        assert columns == order[:count]
        share = torch.softmax(torch.tensor(row, dtype=torch.float64), 0)
        assert scores == pytest.approx([float(share[c]) for c in columns], rel=1e-5)
        assert all(0.0 <= score <= 1.0 for score in scores)


def test_the_first_pick_is_the_choice_on_a_row_full_of_ties():
    perturbed = torch.randn(3, 49152, generator=torch.Generator().manual_seed(0)).clamp(max=2.0)
    assert [columns for columns, _ in pick_top(perturbed, [1, 1, 1])] == [
        [int(c)] for c in perturbed.argmax(1)
    ]
    tied = (perturbed[1] == 2.0).nonzero().flatten().tolist()
    picked = pick_top(perturbed, [0, 40, 2])
    assert picked[1][0] == tied[:40]
    for (columns, scores), (same, near) in zip(picked, pick_by_numpy(perturbed, [0, 40, 2]), strict=True):
        assert columns == same and scores == pytest.approx(near, rel=1e-5)


Q = np.array([0.0, 0.5, 0.2, 0.0, 0.3, 0.0])


def test_iid_draws_follow_q():
    drawn = draw_iid(Q, 30_000, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=len(Q))
    assert counts[Q == 0].sum() == 0
    assert stats.chisquare(counts[Q > 0], Q[Q > 0] * 30_000).pvalue > 1e-3


def test_draws_without_replacement_follow_the_successive_law():
    generator = np.random.default_rng(0)
    pairs = [tuple(draw_without_replacement(Q, 2, generator)) for _ in range(10_000)]
    support = [(a, b) for a, b in itertools.permutations(np.flatnonzero(Q).tolist(), 2)]
    expected = [Q[a] * Q[b] / (1 - Q[a]) * len(pairs) for a, b in support]
    assert stats.chisquare([pairs.count(pair) for pair in support], expected).pvalue > 1e-3


def test_draws_without_replacement_stop_where_q_ends():
    generator = np.random.default_rng(0)
    for _ in range(50):
        assert sorted(draw_without_replacement(Q, 6, generator)) == [1, 2, 4]
    assert draw_without_replacement(np.zeros(3), 2, generator) == []
    assert draw_without_replacement(Q, 0, generator) == []
    assert Q.sum() == 1.0, "q was written to"


def test_draws_need_mass_but_not_a_sum_of_one():
    with pytest.raises(ValueError, match="no probability mass"):
        draw_iid(np.zeros(3), 1, np.random.default_rng(0))
    assert set(draw_iid(np.array([0.0, 1e-300, 0.0]), 5, np.random.default_rng(0))) == {1}
    assert draw_iid(Q, 0, np.random.default_rng(0)) == []


class Extreme(np.random.Generator):
    def __init__(self, u):
        super().__init__(np.random.PCG64(0))
        self.u = u

    def random(self, *args, **kwargs):
        return self.u


@pytest.mark.parametrize("u", [0.0, 0.5, float(np.nextafter(1.0, 0.0))])
@pytest.mark.parametrize("q", [[0.0, 0.3, 0.0], [0.1, 0.2, 0.3, 0.0], [0.0, 1e-17, 1.0, 1e-17, 0.0]])
def test_a_token_of_probability_zero_is_never_drawn(u, q):
    q = np.array(q)
    assert all(q[t] > 0 for t in draw_iid(q, 1, Extreme(u)) + draw_without_replacement(q, 3, Extreme(u)))


class TestStreams:
    def test_a_stream_is_a_function_of_its_arguments(self):
        arguments = (2**64 - 1, 3, 17, Purpose.DRAFT, 2**63)
        assert np.array_equal(stream(*arguments).random(9), stream(*arguments).random(9))

    def test_any_argument_makes_another_stream(self):
        base = dict(seed=1, sample_index=2, position=3, purpose=Purpose.DRAFT, lane=4)
        changes = [{}, *({name: value + 1} for name, value in base.items())]
        streams = [stream(**{**base, **change}) for change in changes]
        drawn = np.stack([generator.random(5000) for generator in streams])
        assert len(np.unique(drawn)) == drawn.size
        correlation = np.corrcoef(drawn) - np.eye(len(drawn))
        assert np.abs(correlation).max() < 5 / math.sqrt(5000)

    def test_golden_values(self):
        assert stream(7, 1, 42, Purpose.VERIFY).random(2).tolist() == [
            0.5757840967629947,
            0.42729323439454314,
        ]

    @pytest.mark.parametrize("bad", [dict(seed=2**64), dict(seed=-1), dict(position=2**32), dict(lane=-1)])
    def test_arguments_out_of_range(self, bad):
        with pytest.raises(ValueError, match="must be in"):
            stream(**{**dict(seed=1, sample_index=2, position=3, purpose=Purpose.DRAFT), **bad})
