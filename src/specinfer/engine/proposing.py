"""Proposing: a step's trees."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.forced import below, forced_tokens, graft
from specinfer.engine.parts import Parts
from specinfer.engine.scheduler import Scheduled
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import MAX_NODES


def propose(parts: Parts, scheduled: Sequence[Scheduled]) -> list[Proposal]:
    """A tree for each request that may have one, else its root alone."""
    contexts: dict[int, DraftContext] = {}
    chains: dict[int, tuple[int, ...]] = {}
    for i, s in enumerate(scheduled):
        request = s.request
        # The verdict adds one token of its own, and the deepest node needs a position.
        max_depth = min(request.num_remaining - 1, parts.max_model_len - len(request.tokens) - 1)
        if s.max_nodes > 1 and max_depth > 0:
            assert request.table is not None
            max_nodes = min(s.max_nodes, MAX_NODES)
            contexts[i] = DraftContext(
                request.tokens,
                request.table.committed,
                request.row(),
                max_depth,
                max_nodes,
                request.draft_notes,
            )
            limit = min(parts.max_forced_tokens, max_depth, max_nodes - 1)
            chains[i] = forced_tokens(contexts[i].row, limit)
    drafted = draft(parts, {i: below(c, chains[i], parts.max_tree_nodes) for i, c in contexts.items()})
    proposals = []
    for i, s in enumerate(scheduled):
        proposal = drafted.get(i)
        if i in contexts:
            proposal = proposal or Proposal(TokenTree.root_only((chains[i] or s.request.tokens)[-1]), {})
            proposal = graft(contexts[i], chains[i], proposal, parts.max_forced_tokens)
        proposals.append(proposal or Proposal(TokenTree.root_only(s.request.tokens[-1]), {}))
    return proposals


def draft(parts: Parts, contexts: dict[int, DraftContext]) -> dict[int, Proposal]:
    """The drafter's trees, for contexts that have room for one."""
    contexts = {i: c for i, c in contexts.items() if c.max_nodes > 1 and c.max_depth > 0}
    if not parts.drafter or not contexts or (parts.planner and parts.planner.is_resting):
        return {}
    handle = parts.drafter.launch(list(contexts.values()), parts.topology)
    proposals = dict(zip(contexts, parts.drafter.collect(handle), strict=True))
    for i, proposal in proposals.items():
        assert proposal.tree.num_nodes <= contexts[i].max_nodes, "a drafter exceeded its nodes"
        assert proposal.tree.max_depth <= contexts[i].max_depth, "a drafter exceeded its depth"
    return proposals
