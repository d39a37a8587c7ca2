"""K/V in the pools equals K/V recomputed from scratch, whatever was committed, shared, dropped or aborted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, SamplingParams
from specinfer.attention import Span
from specinfer.draft.ensemble import EnsembleDrafter
from specinfer.draft.model import ModelDrafter
from specinfer.runtime import Batch, ModelRunner, WorkItem
from specinfer.tree import Level

SLOTS = 90


def recomputed(runner: ModelRunner, token_ids: np.ndarray) -> list[torch.Tensor]:
    """K and V of every layer for a plain sequence, written into scratch-like slots of a copied pool."""
    n = len(token_ids)
    saved = [t.clone() for t in (*runner.pool.k, *runner.pool.v)]
    slots = np.arange(n)
    runner.run(
        Batch.of([WorkItem(Span(slots[:0], slots, np.arange(-1, n - 1)), token_ids, np.zeros(0, np.int64))])
    )
    result = [t[:n].clone() for t in (*runner.pool.k, *runner.pool.v)]
    for tensor, old in zip((*runner.pool.k, *runner.pool.v), saved, strict=True):
        tensor.copy_(old)
    return result


class AnyTree:
    """A topology that rolls a die for every node."""

    max_depth = 4
    num_nodes = 16

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def expand(self, level: Level) -> np.ndarray:
        return self._rng.integers(0, 4, len(level.request))


def kept(llm: LLM) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, their slots) of every running request and of every text in the prefix cache."""
    result = []
    for request in llm.engine.parts.scheduler.running:
        assert request.table is not None
        result.append((request.tokens[: request.table.num_committed], request.table.committed))
    assert llm.engine.prefix_cache is not None
    for leaf in llm.engine.prefix_cache.nodes():
        if not leaf.children:
            edges = [leaf]
            while edges[-1].parent is not None:
                edges.append(edges[-1].parent)
            tokens = [token for edge in edges[::-1] for token in edge.tokens]
            result.append((tokens, np.concatenate([edge.slots for edge in edges[::-1]])))
    return [(tokens, slots) for tokens, slots in result if tokens]


def check_kv(llm: LLM, tokens: list[int], slots: np.ndarray) -> int:
    """Compare every filled slot of a text, in target and drafts; returns how many there were."""
    parts = llm.engine.parts
    assert isinstance(parts.drafter, EnsembleDrafter)
    drafts = [d for d in parts.drafter._drafters if isinstance(d, ModelDrafter)]
    assert parts.runner.pool.filled[slots].all()
    checked = 0
    for runner, vocab in [(parts.runner, None), *((d._runner, d._vocab) for d in drafts)]:
        ids = np.array(tokens, np.int64)
        if vocab is not None and vocab.to_draft is not None:
            ids = vocab.to_draft[ids]
        filled = runner.pool.filled[slots]
        if filled.any():
            index = torch.from_numpy(slots[filled])
            expected = recomputed(runner, ids)
            for ours, right in zip((*runner.pool.k, *runner.pool.v), expected, strict=True):
                assert torch.equal(ours[index], right[torch.from_numpy(filled)])
            checked += int(filled.sum())
    return checked


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_pools_equal_recomputation(
    tiny_model: Path, tiny_draft: Path, other_draft: Path, seed: int, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    llm = LLM(
        str(tiny_model),
        drafts=[str(tiny_draft), str(other_draft), "ngram"],
        tree=AnyTree(rng),
        dtype="float32",
        max_num_seqs=3,
        max_step_tokens=13,
        kv_memory=SLOTS * (256 + 256 + 128),
    )
    assert llm.engine.allocator.num_slots == SLOTS
    prompts = [[1, 2, 3, 4, 5, 6, *rng.integers(0, 256, rng.integers(1, 20)).tolist()] for _ in range(6)]
    requests = []
    checked = 0
    for step in range(400):
        if prompts and rng.random() < 0.3:
            params = SamplingParams(temperature=temperature, seed=step, max_tokens=int(rng.integers(2, 40)))
            requests += llm.engine.add_request(prompts.pop(), params)
        if requests and rng.random() < 0.05:
            llm.engine.abort(requests[int(rng.integers(len(requests)))])
            llm.engine.check_integrity()
        if llm.engine.has_work:
            llm.engine.step()
            llm.engine.check_integrity()
            if rng.random() < 0.25 and (texts := kept(llm)):
                checked += check_kv(llm, *texts[int(rng.integers(len(texts)))])
        elif not prompts:
            break
    assert all(r.finish_reason is not None for r in requests)
    for tokens, slots in kept(llm):
        checked += check_kv(llm, tokens, slots)
    assert checked > 0
    cached = llm.engine.prefix_cache
    assert cached is not None
    assert llm.engine.allocator.num_free + cached.num_slots == SLOTS
    assert cached.num_evictable == cached.num_slots, "a finished request still holds its prefix"
