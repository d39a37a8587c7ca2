"""Proposing: a step's trees."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.engine.parts import Parts
from specinfer.engine.scheduler import Scheduled
from specinfer.tree import TokenTree


def propose(parts: Parts, scheduled: Sequence[Scheduled]) -> list[Proposal]:
    """A tree for each request that may have one, else its root alone."""
    proposals: dict[int, Proposal] = {}
    contexts: dict[int, DraftContext] = {}
    for i, s in enumerate(scheduled):
        request = s.request
        # The verdict adds one token of its own, and the deepest node needs a position.
        max_depth = min(request.num_remaining - 1, parts.max_model_len - len(request.tokens) - 1)
        if parts.drafter and s.max_nodes > 1 and max_depth > 0:
            assert request.table is not None
            contexts[i] = DraftContext(
                request.tokens,
                request.table.committed,
                request.row(),
                max_depth,
                s.max_nodes,
                request.draft_notes,
            )
    if parts.drafter and contexts:
        handle = parts.drafter.launch(list(contexts.values()), parts.topology)
        for i, proposal in zip(contexts, parts.drafter.collect(handle), strict=True):
            assert proposal.tree.num_nodes <= contexts[i].max_nodes, "a drafter exceeded its nodes"
            assert proposal.tree.max_depth <= contexts[i].max_depth, "a drafter exceeded its depth"
            proposals[i] = proposal
    return [
        proposals.get(i) or Proposal(TokenTree.root_only(s.request.tokens[-1]), {})
        for i, s in enumerate(scheduled)
    ]
