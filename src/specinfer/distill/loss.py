"""What a student learns from: the target's distribution, as its best tokens and the rest."""

from __future__ import annotations

import torch

SMALLEST_REST = 1e-6


def top_k_loss(
    logits: torch.Tensor, top_ids: torch.Tensor, top_probs: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of the student relative to the target, on the tokens kept and one class for all others.

    logits: [n, V]; top_ids: [n, k] draft ids, -1 for a token the student has not; top_probs: [n, k]; weights:
    [n]. What the student has not belongs to the rest. -> the weighted sum.
    """
    is_known = top_ids >= 0
    logits = logits.float()
    kept = logits.gather(1, top_ids.clamp_min(0)) - logits.logsumexp(dim=1, keepdim=True)
    p = top_probs * is_known
    q_rest = 1 - (kept.exp() * is_known).sum(dim=1)
    rest = (1 - p.sum(dim=1)).clamp_min(0.0) * q_rest.clamp_min(SMALLEST_REST).log()
    return -(weights * ((p * kept).sum(dim=1) + rest)).sum()
