"""Parts: what an engine is made of, and what its step hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specinfer.draft.drafter import Drafter, Proposal
from specinfer.draft.planner import Planner
from specinfer.engine.request import Request
from specinfer.engine.scheduler import Scheduler
from specinfer.metrics import StepTimer
from specinfer.runtime import Runner
from specinfer.sampling.chooser import Chooser
from specinfer.tree import Topology
from specinfer.verify import Verifier


@dataclass(frozen=True)
class Parts:
    """What a step works with.

    readers: of the drafts that read the target's hidden rows. planner: the topology, where it is one that
    learns from steps. max_tree_nodes: of the trees that are drafted. max_forced_tokens: more nodes, for what
    a grammar forces.
    """

    scheduler: Scheduler
    runner: Runner
    readers: Sequence[Runner]
    chooser: Chooser
    verifier: Verifier
    drafter: Drafter | None
    topology: Topology
    planner: Planner | None
    max_tree_nodes: int
    max_model_len: int
    max_forced_tokens: int
    timer: StepTimer


@dataclass(frozen=True)
class Emission:
    """What one request got from a step: tokens, of which the leading num_accepted came from a draft."""

    request: Request
    token_ids: tuple[int, ...]
    num_accepted: int
    proposal: Proposal
