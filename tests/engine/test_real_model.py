"""The real target: the same tokens however they are made. The long version is benchmarks/exactness.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, Chain, Expansion, SamplingParams
from specinfer.draft.ensemble import EnsembleDrafter
from specinfer.draft.model import ModelDrafter

PROMPTS = [
    "The old lighthouse keeper climbed the stairs and",
    "def fibonacci(n):\n",
    "Question: What is 12 + 30? Answer:",
    "one two three four one two three four one two",
]
NUM_TOKENS = 32


@pytest.fixture(scope="module", params=["float32", "bfloat16", "auto"])
def llm(smollm2_path: Path, request: Any) -> LLM:
    """One load for all: drafts are taken out of it, not added."""
    return LLM(
        "smollm2-135m", drafts=["tokens", "features", "ngram"], tree="3,2,1,1", dtype=request.param,
        max_model_len=128, max_num_seqs=4,
    )  # fmt: skip


def run(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of every prompt of a batch, and how many of them drafts had proposed."""
    outputs = llm.generate(prompts, params, progress=False)
    llm.engine.check_integrity()
    completions = [o.outputs[0] for o in outputs]
    return [c.token_ids for c in completions], sum(c.stats.num_accepted_tokens for c in completions)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_tokens(llm: LLM, put: Any, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    merged = llm.engine.parts.drafter
    assert isinstance(merged, EnsembleDrafter)
    default, features, _ = merged._drafters
    assert isinstance(default, ModelDrafter)
    with put(llm, drafter=None, max_tree_nodes=1):
        expected, accepted = run(llm, PROMPTS, params)
        assert accepted == 0
        assert run(llm, PROMPTS[:1], params)[0] == expected[:1], "alone"
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
    for name, drafter, topology in [
        ("chain", default, Chain(4)),
        ("tree", default, Expansion(3, 2, 1, 1)),
        ("features", features, Expansion(2, 2, 1)),
        ("merged", merged, Expansion(2, 1)),
    ]:
        with put(llm, drafter=drafter, topology=topology, max_tree_nodes=22):
            tokens, accepted = run(llm, PROMPTS, params)
        assert tokens == expected, name
        assert accepted > NUM_TOKENS // 2, f"{name}: hardly anything was accepted"
    with put(llm, drafter=merged, topology=Expansion(2, 1), max_tree_nodes=13):
        assert run(llm, PROMPTS[2:3], params)[0] == expected[2:3], "merged and alone"
