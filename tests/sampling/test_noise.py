"""The noise: golden vectors, a scalar reference, its law, and independence from how it is asked for."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specinfer.sampling import noise
from specinfer.sampling.noise import NoiseCache, gumbel

MASK = 0xFFFFFFFF
VOCAB = 49152


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def scalar_nlog(x: float) -> float:
    """The recipe of noise.py's docstring in Python's own doubles, which CPython never fuses."""
    bits = struct.unpack("<q", struct.pack("<d", x))[0]
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = struct.unpack("<d", struct.pack("<q", bits - (e << 52)))[0]
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    n = [
        -6.666666666666735130e-01,
        -3.999999999940941908e-01,
        -2.857142874366239149e-01,
        -2.222219843214978396e-01,
        -1.818357216161805012e-01,
        -1.531383769920937332e-01,
        -1.479819860511658591e-01,
    ]
    r = n[6]
    for c in (n[5], n[4], n[3], n[2], n[1], n[0], -2.0):
        r = r * z + c
    return (e * -1.90821492927058770002e-10 + r * s) + e * -6.93147180369123816490e-01


def scalar_gumbel(seed: int, sample_index: int, position: int, token_id: int) -> np.float32:
    words = scalar_philox([token_id // 4, sample_index, position, 0x67756D62], [seed & MASK, seed >> 32])
    u = (words[token_id % 4] + 0.5) * 2.0**-32
    return np.float32(scalar_nlog(scalar_nlog(u)))


def shipped_philox(counter: list[int], key: list[int]) -> list[int]:
    keys = noise.round_keys(np.array([key[1] << 32 | key[0]], np.uint64))
    words = noise.philox(np, [np.full((1, 1), c, np.int64) for c in counter], keys.reshape(-1, 2, 1, 1))
    return [int(w[0, 0]) & MASK for w in words]


@pytest.mark.parametrize("philox", [scalar_philox, shipped_philox])
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_random123s_known_answers(philox, counter, key, expected):
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    assert philox(words[0], words[1]) == words[2]


TOKENS = (0, 1, 2, 3, 4, 1000, 32767, 49151)
GOLDEN = {
    # (seed, sample index, position): bits of g as fp32 at TOKENS
    (0, 0, 0): "403e703f 3fb7839e 404aae40 3f08dc3e bc8633a6 bfbb96ad bea8a58c bf77ad20",
    (1, 0, 1): "be164cd2 bece38b9 bed05cb2 bfdbd043 bf8018a2 bf2683d6 3f9aca1a 3f97119d",
    (0x0123456789ABCDEF, 2, 77): "be97e1b2 3f3f5772 3e965639 bf24dd65 3df72c57 be5f335a 3f3c32a1 3f9959e2",
    (
        2**64 - 1,
        2**32 - 1,
        2**32 - 1,
    ): "bfb1abaa 3eb6983f bebde0d3 3f858501 bf67e361 3f113d93 3f89ab68 bf58ba0c",
}


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_values(key):
    row = gumbel([key], VOCAB)[0].numpy().view(np.uint32)
    assert " ".join(f"{row[token]:08x}" for token in TOKENS) == GOLDEN[key]


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(1, 70),
)
def test_rows_equal_the_scalar_reference(seed, sample_index, position, num_tokens):
    row = gumbel([(seed, sample_index, position)], num_tokens)[0].numpy()
    assert row.tolist() == [float(scalar_gumbel(seed, sample_index, position, t)) for t in range(num_tokens)]


def test_a_whole_row_equals_the_scalar_reference_at_sampled_tokens():
    key = (2**63 + 12345, 3, 1_000_003)
    row = gumbel([key], VOCAB)[0].numpy()
    for token in [*range(0, VOCAB, 97), VOCAB - 1]:
        assert row[token] == scalar_gumbel(*key, token)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 4095, 32769, 49151, 49152, 65536, 65537, 70001])
def test_values_do_not_depend_on_the_length_of_the_row(num_tokens):
    key = (11, 0, 5)
    longest = gumbel([key], 140000)[0]
    assert torch.equal(gumbel([key], num_tokens)[0], longest[:num_tokens])


@pytest.mark.skipif(noise.native is None, reason="specinfer._cpu was not built")
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3, 127, 128, 129, 5000, VOCAB, 70001]),
)
def test_the_extension_gives_the_same_bits(seed, sample_index, position, num_tokens):
    keys = [(seed, sample_index, position), (sample_index, position, 0)]
    rows = gumbel(keys, num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "native", None)
        assert torch.equal(rows, gumbel(keys, num_tokens))


@pytest.mark.parametrize("num_tokens", [7, 1000, 40001])
def test_values_do_not_depend_on_the_other_rows(num_tokens):
    keys = [(seed, sample, position) for seed in (0, 2**64 - 1) for sample in (0, 3) for position in (0, 9)]
    together = gumbel(keys, num_tokens)
    alone = torch.cat([gumbel([key], num_tokens) for key in keys])
    assert torch.equal(together, alone)


def test_torch_and_numpy_follow_one_recipe():
    keys = [(2**63 + 1, 2, 3), (5, 0, 2**32 - 1), (0, 0, 0)]
    words, schedule = np.arange(9001)[None], noise._schedule(keys)
    with_numpy = noise._gumbel64(np, words, schedule)
    with_torch = noise._gumbel64(torch, torch.from_numpy(words), torch.from_numpy(schedule))
    assert np.array_equal(with_numpy, with_torch.numpy())


def test_the_logarithm_is_accurate():
    generator = np.random.default_rng(0)
    k = np.concatenate([generator.integers(0, 2**32, 400_000), [0, 1, 2**31 - 1, 2**31, MASK - 1, MASK]])
    u = (k + 0.5) * 2.0**-32
    x = u[None].copy()
    spare = (np.empty_like(x, dtype=np.int64), *(np.empty_like(x) for _ in range(3)))
    mine = noise.nlog(np, x, spare)[0]
    assert np.max(np.abs(mine / -np.log(u) - 1.0)) < 1e-15
    assert mine[-1] == pytest.approx(2.0**-33, rel=1e-9)
    assert scalar_nlog(0.25) == math.log(4.0)


def test_the_extreme_values_are_finite():
    largest = scalar_nlog(scalar_nlog((MASK + 0.5) * 2.0**-32))
    smallest = scalar_nlog(scalar_nlog(0.5 * 2.0**-32))
    assert 22.87 < largest < 22.875
    assert -3.131 < smallest < -3.129


@pytest.mark.parametrize(
    "key", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**32)]
)
def test_a_key_out_of_range_is_refused(key):
    with pytest.raises(ValueError, match="out of range"):
        gumbel([key], 4)


def test_no_keys_and_no_tokens():
    assert gumbel([], 5).shape == (0, 5)
    assert gumbel([(0, 0, 0)], 0).shape == (1, 0)


def test_argmax_of_perturbed_logits_follows_the_softmax():
    """200,000 draws, one a position: the law that makes coupled sampling sampling at all."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0])
    temperature, num_draws = 0.7, 200_000
    g = gumbel([(2024, 0, position) for position in range(num_draws)], len(logits))
    counts = np.bincount((logits / temperature + g).argmax(dim=1).numpy(), minlength=len(logits))
    expected = torch.softmax(logits.double() / temperature, 0).numpy() * num_draws
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_one_row_is_gumbel_distributed():
    assert stats.kstest(gumbel([(7, 0, 3)], VOCAB)[0].double().numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize(
    "keys",
    [
        [(7, 0, position) for position in range(2000)],
        [(7, sample, 0) for sample in range(2000)],
        [(seed, 0, 0) for seed in range(2000)],
        [(seed << 32, 0, 0) for seed in range(2000)],
    ],
    ids=["positions", "samples", "seeds", "high-seeds"],
)
def test_neighbouring_rows_are_independent(keys):
    """Correlation of uniforms between rows next to each other and between tokens: |r| ~ N(0, 1/n)."""
    u = np.exp(-np.exp(-gumbel(keys, 64).double().numpy())) - 0.5
    n = u.size
    for pair in (u[1:] * u[:-1], u[:, 1:] * u[:, :-1], u[:, 4:] * u[:, :-4]):
        assert abs(pair.sum() * 12.0) < 5.0 * math.sqrt(n)
    bins = np.histogram(u, bins=64, range=(-0.5, 0.5))[0]
    assert stats.chisquare(bins).pvalue > 1e-3


def test_choices_at_neighbouring_positions_are_independent():
    chosen = gumbel([(3, 0, position) for position in range(40_000)], 4).argmax(dim=1).numpy()
    table = np.bincount(4 * chosen[:-1] + chosen[1:], minlength=16).reshape(4, 4)
    assert stats.chi2_contingency(table).pvalue > 1e-3


class TestNoiseCache:
    def test_rows_are_gumbels(self):
        cache = NoiseCache(50, max_rows=4)
        keys = [(1, 0, 5), (1, 0, 6), (1, 0, 5), (1, 0, 5)]
        for _ in range(2):
            assert torch.equal(cache.rows(keys), gumbel(keys, 50))

    @given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12), st.integers(1, 5))
    def test_any_history_of_requests_gives_the_right_rows(self, calls, max_rows):
        cache = NoiseCache(9, max_rows=max_rows)
        for positions in calls:
            keys = [(4, 1, position) for position in positions]
            assert torch.equal(cache.rows(keys), gumbel(keys, 9))

    def test_each_row_is_computed_once(self, monkeypatch):
        made = []
        fill = noise._fill_on_cpu

        def counting(keys, out, scratch):
            made.extend(keys)
            fill(keys, out, scratch)

        monkeypatch.setattr(noise, "_fill_on_cpu", counting)
        cache = NoiseCache(8, max_rows=2)
        a, b, c = (0, 0, 0), (0, 0, 1), (0, 0, 2)
        cache.rows([a, a, b])
        cache.rows([b, a])
        assert made == [a, b]
        cache.rows([c])  # b was used less recently than a
        cache.rows([a])
        assert made == [a, b, c]
        cache.rows([b])
        assert made == [a, b, c, b]

    def test_the_caller_owns_the_result(self):
        cache = NoiseCache(8)
        cache.rows([(0, 0, 0)]).fill_(0.0)
        assert torch.equal(cache.rows([(0, 0, 0)]), gumbel([(0, 0, 0)], 8))


def test_an_interrupted_fill_leaves_no_noise_behind(monkeypatch):
    cache = NoiseCache(50, max_rows=4)
    cache.rows([(1, 0, 0)])
    fill = NoiseCache._fill

    def interrupted(self, keys):
        raise KeyboardInterrupt

    monkeypatch.setattr(NoiseCache, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.rows([(1, 0, 0), (2, 0, 0)])
    monkeypatch.setattr(NoiseCache, "_fill", fill)
    keys = [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert torch.equal(cache.rows(keys), gumbel(keys, 50))
