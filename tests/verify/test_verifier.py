"""The registry of verifiers, the guard against a drafter that does not suit, and the coin."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specinfer.errors import ConfigError
from specinfer.tree import CandidateKind, TokenTree
from specinfer.verify import VERIFIER_NAMES, RandomCoin, Verdict, check_kinds, get_verifier
from specinfer.verify.coin import draw

IID, WR, DET = CandidateKind.IID, CandidateKind.WITHOUT_REPLACEMENT, CandidateKind.DETERMINISTIC


@pytest.mark.parametrize("name", VERIFIER_NAMES)
def test_a_verifier_accepts_what_its_drafters_make(name):
    verifier = get_verifier(name)
    assert verifier.name == name
    check_kinds(verifier, {verifier.sampled_kind, DET})


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"(?s)'typical'.*coupled, multi_step, without_replacement"):
        get_verifier("typical")


@pytest.mark.parametrize(("name", "kind"), [("multi_step", WR), ("without_replacement", IID)])
def test_a_drafter_that_does_not_suit_is_a_configuration_error(name, kind):
    with pytest.raises(ConfigError, match=f"(?s){name}.*{kind.name.lower()}.*coupled"):
        check_kinds(get_verifier(name), {DET, kind})


def test_coupled_takes_every_kind_and_no_law():
    verifier = get_verifier("coupled")
    check_kinds(verifier, set(CandidateKind))
    assert not verifier.needs_law
    assert verifier.sampled_kind == DET
    tree = TokenTree.build([0, 1], [-1, 0], [1.0, 1.0], [])
    coin = RandomCoin(lambda: np.random.default_rng(0))
    assert verifier.verify(tree, {}, np.array([1, 4]), coin) == Verdict((1,), 4)


@pytest.mark.parametrize("name", ["multi_step", "without_replacement"])
def test_one_hot_laws_are_greedy_verification(name):
    verifier = get_verifier(name)
    assert verifier.needs_law
    tree = TokenTree.build([0, 1, 2, 2], [-1, 0, 0, 1], [1.0, 0.4, 0.6, 1.0], [])
    for choices in ([1, 2, 0, 0], [2, 1, 1, 1], [0, 0, 0, 0], [1, 0, 2, 2]):
        verdict = verifier.verify(tree, {}, np.eye(3)[choices], RandomCoin(lambda: np.random.default_rng(0)))
        assert verdict == get_verifier("coupled").verify(
            tree, {}, np.array(choices), RandomCoin(lambda: np.random.default_rng(0))
        )


def test_a_random_coin_follows_its_ratio_and_its_weights():
    coin = RandomCoin(lambda: np.random.default_rng(5))
    num_tosses = 20_000
    heads = sum(coin.accept(0.3) for _ in range(num_tosses))
    assert stats.binomtest(heads, num_tosses, 0.3).pvalue > 1e-3
    assert all(coin.accept(1.0) and coin.accept(np.inf) and not coin.accept(0.0) for _ in range(1000))
    weights = np.array([0.0, 2.0, 0.0, 1.0, 5.0])
    counts = np.bincount([coin.draw(weights) for _ in range(num_tosses)], minlength=5)
    assert counts[0] == counts[2] == 0
    assert stats.chisquare(counts[[1, 3, 4]], weights[[1, 3, 4]] / 8 * num_tosses).pvalue > 1e-3


def test_a_draw_never_hits_a_token_without_weight():
    almost_one = np.nextafter(1.0, 0.0)
    for weights in ([0.0, 0.3, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 1e-300], [0.1, 0.2, 0.3, 0.0]):
        for u in (0.0, 0.5, almost_one):
            assert weights[draw(u, np.array(weights))] > 0.0
