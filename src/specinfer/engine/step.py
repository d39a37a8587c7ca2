"""One step of the engine. Plain decoding, prefill, chains, trees and ensembles are all this function.

schedule -> propose trees -> reserve slots -> one target forward
         -> choose -> verify -> commit -> observe -> emit
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specinfer.attention import Span
from specinfer.draft.drafter import Proposal
from specinfer.engine.parts import Emission, Parts
from specinfer.engine.proposing import propose
from specinfer.engine.request import Request
from specinfer.engine.scheduler import Scheduled
from specinfer.engine.scoring import score_paths, score_prompts
from specinfer.engine.verifying import verify
from specinfer.outputs import TokenLogprobs
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.batch import trunk_and_tree
from specinfer.tree import TokenTree
from specinfer.verify import Verdict


def step(parts: Parts) -> list[Emission]:
    """Run one step; returns the emissions of the requests that were decoded in it."""
    scheduled = parts.scheduler.schedule(
        parts.max_tree_nodes if parts.drafter else 1, parts.max_forced_tokens
    )
    if not scheduled:
        return []
    with parts.timer.phase("draft"):
        proposals = propose(parts, scheduled)
    items = [work_item(s, p.tree) for s, p in zip(scheduled, proposals, strict=True)]
    batch = Batch.of(items)
    with parts.timer.phase("target"):
        logits, _ = parts.runner.run(batch)
    with parts.timer.phase("verify"):
        logits = score_prompts(scheduled, items, logits)
        decoded = [(s.request, p) for s, p in zip(scheduled, proposals, strict=True) if s.is_decoded]
        verdicts = verify(parts, decoded, logits)
        judged = zip(verdicts, score_paths(decoded, verdicts, logits), strict=True)
    emissions = [
        commit(parts, s, p, *(next(judged) if s.is_decoded else (None, ())))
        for s, p in zip(scheduled, proposals, strict=True)
    ]
    if parts.drafter and decoded:
        trees = [p.tree for _, p in decoded]
        parts.drafter.observe(trees, verdicts)
        if parts.planner:
            parts.planner.observe(trees, verdicts, len(batch.token_ids), parts.timer.since("draft"))
    return [e for e in emissions if e is not None]


def work_item(s: Scheduled, tree: TokenTree) -> WorkItem:
    """Reserve slots and lay out the trunk and the tree below its last token."""
    table = s.request.table
    assert table is not None
    start = table.num_committed
    slots = table.reserve(s.trunk_len + tree.num_draft_tokens)
    assert slots is not None, "the scheduler promised these slots"
    trunk = s.request.tokens[start : start + s.trunk_len]
    span = Span(table.committed, slots, trunk_and_tree(s.trunk_len, tree.parents))
    rows = [position - start for position in s.request.prompt_rows(s.trunk_len)]
    if s.is_decoded:
        rows += range(s.trunk_len - 1, s.trunk_len + tree.num_draft_tokens)
    return WorkItem(
        span, np.concatenate([np.array(trunk, np.int64), tree.token_ids[1:]]), np.array(rows, np.int64)
    )


def commit(
    parts: Parts,
    s: Scheduled,
    proposal: Proposal,
    verdict: Verdict | None,
    logprobs: Sequence[TokenLogprobs],
) -> Emission | None:
    """Keep the trunk and the accepted path, drop the other branches, hand the tokens on."""
    request, tree = s.request, proposal.tree
    assert request.table is not None
    if verdict is None:
        commit_slots(parts, request, range(s.trunk_len))
        return None
    path_tokens = [int(tree.token_ids[node]) for node in verdict.path]
    is_first = request.num_output_tokens == 0
    taken = request.accept([*path_tokens, verdict.next_token], logprobs)
    num_accepted = min(taken, len(verdict.path))
    kept = [s.trunk_len - 1 + node for node in verdict.path[:num_accepted]]
    commit_slots(parts, request, [*range(s.trunk_len), *kept])
    request.observe(tree, num_accepted)
    emitted = tuple([*path_tokens, verdict.next_token][:taken])
    if request.finish_reason is not None:
        parts.scheduler.finish(request)
    elif is_first:
        request.table.publish(request.tokens[: request.table.num_committed])
    return Emission(request, emitted, num_accepted, proposal)


def commit_slots(parts: Parts, request: Request, path: Sequence[int]) -> None:
    """Keep reserved[path]: their K/V was written by this step's forward."""
    assert request.table is not None
    request.table.commit(path)
    parts.runner.pool.filled[request.table.committed[-len(path) :]] = True
