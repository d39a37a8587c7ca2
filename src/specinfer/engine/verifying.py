"""Verifying: a step's verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.draft.drafter import Proposal
from specinfer.engine.parts import Parts
from specinfer.engine.request import Request
from specinfer.sampling.pipeline import divisor
from specinfer.sampling.row import Row
from specinfer.sampling.streams import Purpose, stream
from specinfer.tree import TokenTree
from specinfer.verify import Verdict
from specinfer.verify.coin import RandomCoin

Judge = Callable[[NDArray[np.float32], Row], Any]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""What the order of additions may change of a row of logits, in parts of the largest."""


class Evidence:
    """What a verifier judges a tree by, made node by node when asked: a walk looks at its own path alone."""

    def __init__(
        self,
        judge: Judge,
        request: Request,
        tree: TokenTree,
        logits: NDArray[np.float32],
        start: int,
    ) -> None:
        """logits: of a batch of trees; this one's begin at row `start`."""
        self._judge, self._request, self._tree = judge, request, tree
        self._logits, self._start = logits, start

    def __getitem__(self, node: int) -> Any:
        """The target's choice, or its law, after a node."""
        row = self._request.row(self._tree.path_tokens(node))
        return self._judge(self._logits[self._start + node], row)


def verify(parts: Parts, decoded: Sequence[tuple[Request, Proposal]], logits: torch.Tensor) -> list[Verdict]:
    """logits: the decoded requests' trees, flattened."""
    verdicts = []
    start = 0
    for (request, (tree, law)), evidence in zip(decoded, make_evidence(parts, decoded, logits), strict=True):
        verdict = parts.verifier.verify(tree, law, evidence, RandomCoin(partial(coin_stream, request)))
        verdicts.append(verdict)
        if not (parts.runner.keeps_bits or parts.verifier.needs_law):
            walked = [0, *verdict.path]
            rows = [request.row(tree.path_tokens(node)) for node in walked]
            request.num_near_ties += num_near_ties(parts, logits[[start + node for node in walked]], rows)
        start += tree.num_nodes
    return verdicts


def coin_stream(request: Request) -> np.random.Generator:
    """What a step's verification of a request is decided by, where chance has a part in it."""
    root = request.row()
    return stream(root.seed, root.sample_index, root.position, Purpose.VERIFY)


def num_near_ties(parts: Parts, logits: torch.Tensor, rows: Sequence[Row]) -> int:
    """How many of these rows' choices lead by so little that rounding may turn them."""
    scores = parts.chooser.perturbed(logits, rows).topk(2).values
    divisors = torch.tensor([divisor(row) for row in rows], device=logits.device)
    rounding = ROUNDING[parts.runner.pool.k[0].dtype] * logits.float().abs().amax(dim=1) / divisors
    return int((scores[:, 0] - scores[:, 1] <= rounding).sum())


def make_evidence(
    parts: Parts, decoded: Sequence[tuple[Request, Proposal]], logits: torch.Tensor
) -> Sequence[Evidence | NDArray[Any]]:
    """For each tree what the verifier judges by, [num_nodes] choices or [num_nodes, V] probabilities of the
    target.

    Off the CPU all are made at once, so that only they cross to the host.
    """
    if not decoded:
        return []
    chooser, needs_law = parts.chooser, parts.verifier.needs_law
    counts = [tree.num_nodes for _, (tree, _) in decoded]
    if logits.device.type == "cpu":
        judge: Judge = chooser.law_of_one if needs_law else chooser.choose_one
        host = logits.float().numpy()
        starts = accumulate(counts, initial=0)
        return [
            Evidence(judge, r, p.tree, host, start) for (r, p), start in zip(decoded, starts, strict=False)
        ]
    rows = [r.row(p.tree.path_tokens(node)) for r, p in decoded for node in range(p.tree.num_nodes)]
    judged = (chooser.probabilities if needs_law else chooser.choose)(logits, rows)
    return np.split(judged, np.cumsum(counts)[:-1])
