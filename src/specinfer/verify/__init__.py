"""Verification: which of a tree's tokens the target would have written itself. Never imports a draft."""

from specinfer.verify.coin import Coin, RandomCoin
from specinfer.verify.coupled import walk
from specinfer.verify.law import DraftLaw
from specinfer.verify.multi_step import multi_step
from specinfer.verify.verdict import Verdict
from specinfer.verify.verifier import VERIFIER_NAMES, Verifier, check_kinds, get_verifier
from specinfer.verify.without_replacement import without_replacement

__all__ = [
    "VERIFIER_NAMES",
    "Coin",
    "DraftLaw",
    "RandomCoin",
    "Verdict",
    "Verifier",
    "check_kinds",
    "get_verifier",
    "multi_step",
    "walk",
    "without_replacement",
]
