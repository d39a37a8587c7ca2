"""Verifying: a step's verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.draft.drafter import Proposal
from specinfer.engine.parts import Parts
from specinfer.engine.request import Request
from specinfer.sampling.chooser import Choices
from specinfer.sampling.pipeline import divisor
from specinfer.sampling.row import Row
from specinfer.sampling.streams import Purpose, stream
from specinfer.verify import Verdict
from specinfer.verify.coin import RandomCoin

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""What the order of additions may change of a row of logits, in parts of the largest."""


def verify(parts: Parts, decoded: Sequence[tuple[Request, Proposal]], logits: torch.Tensor) -> list[Verdict]:
    """logits: the decoded requests' trees, flattened."""
    rows = [
        request.row(proposal.tree.path_tokens(node))
        for request, proposal in decoded
        for node in range(proposal.tree.num_nodes)
    ]
    if not rows:
        return []
    evidence = make_evidence(parts, logits, rows)
    verdicts = []
    start = 0
    for request, (tree, law) in decoded:
        end = start + tree.num_nodes
        root = rows[start]
        coin = RandomCoin(
            partial(stream, root.seed, root.sample_index, root.position, Purpose.VERIFY, lane=0)
        )
        verdict = parts.verifier.verify(tree, law, evidence[start:end], coin)
        verdicts.append(verdict)
        if not (parts.runner.keeps_bits or parts.verifier.needs_law):
            walked = [start, *(start + node for node in verdict.path)]
            request.num_near_ties += num_near_ties(parts, logits[walked], [rows[i] for i in walked])
        start = end
    return verdicts


def num_near_ties(parts: Parts, logits: torch.Tensor, rows: Sequence[Row]) -> int:
    """How many of these rows' choices lead by so little that rounding may turn them."""
    scores = parts.chooser.perturbed(logits, rows).topk(2).values
    divisors = torch.tensor([divisor(row) for row in rows], device=logits.device)
    rounding = ROUNDING[parts.runner.pool.k[0].dtype] * logits.float().abs().amax(dim=1) / divisors
    return int((scores[:, 0] - scores[:, 1] <= rounding).sum())


def make_evidence(
    parts: Parts, logits: torch.Tensor, rows: Sequence[Row]
) -> NDArray[np.float64] | NDArray[np.int64] | Choices:
    """What the verifier judges by, [num rows]: the target's probabilities or its choices.

    Off the CPU every choice is made at once, so that only ids cross to the host.
    """
    if parts.verifier.needs_law:
        return parts.chooser.probabilities(logits, rows)
    if logits.device.type != "cpu":
        return parts.chooser.choose(logits, rows)
    return Choices(parts.chooser, logits, rows)
