"""Verifier: the rules that exist, by name, and the candidates each may judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from specinfer.errors import ConfigError
from specinfer.tree import CandidateKind, TokenTree
from specinfer.verify.coin import Coin
from specinfer.verify.coupled import walk
from specinfer.verify.law import DraftLaw
from specinfer.verify.multi_step import multi_step
from specinfer.verify.verdict import Verdict
from specinfer.verify.without_replacement import without_replacement


@dataclass(frozen=True)
class Verifier:
    """One verification rule.

    kinds: the candidates it is exact for. sampled_kind: the kind a model drafter makes for it at temperature
    above 0. needs_law: whether it judges by probabilities, the draft's and the target's.
    verify: (tree, law, evidence, coin) -> Verdict. evidence[node] is the target's probabilities after a node,
    [V] fp64, where needs_law; else the target's choice, and law and coin are not looked at.
    """

    name: str
    kinds: frozenset[CandidateKind]
    sampled_kind: CandidateKind
    needs_law: bool
    verify: Callable[[TokenTree, DraftLaw, Any, Coin], Verdict]


def _coupled(tree: TokenTree, law: DraftLaw, choices: NDArray[Any], coin: Coin) -> Verdict:
    return walk(tree, choices)


_VERIFIERS = (
    Verifier("coupled", frozenset(CandidateKind), CandidateKind.DETERMINISTIC, False, _coupled),
    Verifier(
        "multi_step",
        frozenset({CandidateKind.IID, CandidateKind.DETERMINISTIC}),
        CandidateKind.IID,
        True,
        multi_step,
    ),
    Verifier(
        "without_replacement",
        frozenset({CandidateKind.WITHOUT_REPLACEMENT, CandidateKind.DETERMINISTIC}),
        CandidateKind.WITHOUT_REPLACEMENT,
        True,
        without_replacement,
    ),
)

VERIFIER_NAMES = tuple(verifier.name for verifier in _VERIFIERS)


def get_verifier(name: str) -> Verifier:
    """Raises ConfigError, with the names there are."""
    for verifier in _VERIFIERS:
        if verifier.name == name:
            return verifier
    raise ConfigError(f"no verifier is called {name!r}", hint="verifiers: " + ", ".join(VERIFIER_NAMES))


def check_kinds(verifier: Verifier, kinds: Iterable[CandidateKind]) -> None:
    """Raises ConfigError when a drafter that makes `kinds` of candidates does not suit the verifier."""
    wrong = sorted(set(kinds) - verifier.kinds)
    if wrong:
        right = _names(sorted(verifier.kinds))
        raise ConfigError(
            f"verifier {verifier.name!r} is not exact for {_names(wrong)} candidates",
            hint=f"use a drafter whose candidates are {right}, or verifier='coupled'",
        )


def _names(kinds: Iterable[CandidateKind]) -> str:
    return " or ".join(CandidateKind(kind).name.lower() for kind in kinds)
