"""Token trees: pure data. Knows no model and no engine."""

from specinfer.tree.merge import merge
from specinfer.tree.token_tree import Candidate, CandidateKind, TokenTree
from specinfer.tree.topology import Chain, Expansion, Level, Topology, parse_topology

__all__ = [
    "Candidate",
    "CandidateKind",
    "Chain",
    "Expansion",
    "Level",
    "TokenTree",
    "Topology",
    "merge",
    "parse_topology",
]
