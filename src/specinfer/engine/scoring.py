"""Scoring: the log probabilities that requests ask for, of their prompts and of what they emit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specinfer.draft.drafter import Proposal
from specinfer.engine.request import Request
from specinfer.engine.scheduler import Scheduled
from specinfer.outputs import TokenLogprobs
from specinfer.runtime import WorkItem
from specinfer.sampling import token_logprobs
from specinfer.verify import Verdict


def score_prompts(
    scheduled: Sequence[Scheduled], items: Sequence[WorkItem], logits: torch.Tensor
) -> torch.Tensor:
    """Hand each request those of its prompt's tokens; returns the other rows, the decoded requests' trees.

    logits: of the items, flattened; an item's first rows are those of `Request.prompt_rows`.
    """
    if not any(s.request.prompt_rows(s.trunk_len) for s in scheduled):
        return logits
    trees = []
    counts = [len(item.logits_rows) for item in items]
    for s, rows in zip(scheduled, torch.split(logits, counts), strict=True):
        request = s.request
        positions = request.prompt_rows(s.trunk_len)
        if request.prompt_logprobs is not None:
            followers = [request.tokens[position + 1] for position in positions]
            k = request.params.prompt_logprobs or 0
            request.prompt_logprobs += token_logprobs(rows[: len(positions)], followers, k)
        trees.append(rows[len(positions) :])
    return torch.cat(trees)


def score_paths(
    decoded: Sequence[tuple[Request, Proposal]], verdicts: Sequence[Verdict], logits: torch.Tensor
) -> list[Sequence[TokenLogprobs]]:
    """Of each verdict's tokens, where the request asks for them. logits: of the trees, flattened."""
    result: list[Sequence[TokenLogprobs]] = []
    start = 0
    for (request, (tree, _)), verdict in zip(decoded, verdicts, strict=True):
        k = request.params.logprobs
        if k is None:
            result.append(())
        else:
            tokens = [*(int(tree.token_ids[node]) for node in verdict.path), verdict.next_token]
            result.append(
                token_logprobs(logits[[start, *(start + node for node in verdict.path)]], tokens, k)
            )
        start += tree.num_nodes
    return result
