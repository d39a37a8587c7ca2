"""The stochastic verifiers in the whole engine: tokens come with the target's own probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from specinfer import LLM, SamplingParams, TokenTree
from specinfer.attention import Span
from specinfer.runtime import Batch, WorkItem
from specinfer.sampling import Row, make_processors
from specinfer.sampling.penalties import Penalties
from specinfer.verify import Verdict

VOCAB = 8
PROMPT = [1, 5, 2]
NUM_TOKENS = 3
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer": False, "num_hidden_layers": 1, "scale": 0.9}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, write_model: Any) -> list[Path]:
    """A target over 8 tokens, a draft near it, and another not so near."""
    directory = tmp_path_factory.mktemp("eight")
    target = write_model(directory / "target", **SHAPE)
    weights = load_file(str(target / "model.safetensors"))
    torch.manual_seed(5)
    near = write_model(directory / "near", noise_on=weights, noise=0.3, **SHAPE)
    far = write_model(directory / "far", noise_on=weights, noise=0.8, **SHAPE)
    return [target, near, far]


@pytest.fixture(scope="module")
def exact(models: list[Path]) -> Any:
    """exact(params, bad words): {three tokens: their probability}, by feeding every prefix to the target."""

    def law(params: SamplingParams, words: Sequence[Sequence[int]] = ()) -> dict[tuple[int, ...], float]:
        parts = LLM(str(models[0]), dtype="float32").engine.parts
        prefixes = [p for n in range(NUM_TOKENS) for p in product(range(VOCAB), repeat=n)]
        items, rows, start = [], [], 0
        ends = tuple(params.stop_token_ids)
        for prefix in prefixes:
            tokens = np.array([*PROMPT, *prefix])
            n = len(tokens)
            span = Span(np.zeros(0, np.int64), np.arange(start, start + n), np.arange(-1, n - 1))
            items.append(WorkItem(span, tokens, np.array([n - 1])))
            processors = make_processors(
                params, num_prompt_tokens=len(PROMPT), end_token_ids=ends, bad_words=words, vocab_size=VOCAB
            )
            rows.append(Row(params, 0, 0, n, len(PROMPT), ends, tokens.tolist(), (), processors))
            start += n
        p = dict(
            zip(
                prefixes, parts.chooser.probabilities(parts.runner.run(Batch.of(items))[0], rows), strict=True
            )
        )
        return {
            tokens: float(np.prod([p[tokens[:i]][tokens[i]] for i in range(NUM_TOKENS)]))
            for tokens in product(range(VOCAB), repeat=NUM_TOKENS)
        }

    return law


def p_value(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square over the cells; rare ones are pooled."""
    if any(law[cell] == 0.0 for cell in seen):
        return 0.0
    num_samples = seen.total()
    rare = [cell for cell in law if num_samples * law[cell] < 5]
    common = [cell for cell in law if num_samples * law[cell] >= 5]
    observed = [seen[c] for c in common] + [sum(seen[c] for c in rare)]
    expected = [num_samples * law[c] for c in common] + [num_samples * sum(law[c] for c in rare)]
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


PARAMS = SamplingParams(temperature=0.9, top_k=7, max_tokens=NUM_TOKENS + 1, n=400)


def sample(
    llm: LLM, seeds: Sequence[int], params: SamplingParams = PARAMS
) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each three tokens came, and how many draft tokens were accepted."""
    seen: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for seed in seeds:
        for completion in llm.generate(PROMPT, replace(params, seed=seed))[0].outputs:
            seen[completion.token_ids[:NUM_TOKENS]] += 1
            num_accepted += completion.stats.num_accepted_tokens
    llm.engine.check_integrity()
    return seen, num_accepted


def make(models: list[Path], drafts: list[Any], tree: str, verifier: str) -> LLM:
    names = [d if d == "ngram" else str(models[d]) for d in drafts]
    limits = {"max_num_seqs": 200, "max_step_tokens": 1000, "prefix_cache": False}
    return LLM(str(models[0]), drafts=names, tree=tree, verifier=verifier, dtype="float32", **limits)


@pytest.mark.parametrize(
    ("verifier", "drafts", "tree"),
    [
        ("multi_step", [1], "3,2"),
        ("multi_step", [1, 2], "2,1"),
        ("without_replacement", [1], "3,2"),
        ("without_replacement", [2, 1, "ngram"], "2,1"),
    ],
)
def test_tokens_follow_the_target(
    models: list[Path], exact: Any, verifier: str, drafts: list[Any], tree: str
) -> None:
    """Of every sample the first token is the prefill's; the second comes out of a tree, the third out of the
    same tree or the next."""
    law = exact(PARAMS)
    assert abs(sum(law.values()) - 1) < 1e-9
    seen, num_accepted = sample(make(models, drafts, tree, verifier), [11, 12])
    assert num_accepted > seen.total() / 2
    assert p_value(seen, law) > 1e-3


def test_a_wrong_verifier_shows(models: list[Path], exact: Any, put: Any) -> None:
    """The same number of samples tells the law from that of a verifier that takes the first child unseen."""

    def verify(tree: TokenTree, law: Any, p: Any, coin: Any) -> Verdict:
        path = (1,) if tree.num_nodes > 1 else ()
        return Verdict(path, coin.draw(p[len(path)]))

    llm = make(models, [1], "1", "multi_step")
    with put(llm, verifier=replace(llm.engine.parts.verifier, verify=verify)):
        seen, _ = sample(llm, [11, 12])
    assert p_value(seen, exact(PARAMS)) < 1e-6


SEEDS = [21, 22]
WORDS = [[3], [2, 6], [6, 6], [1, 4, 1]]
PARAMETERS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.7},
    "penalties": {"repetition_penalty": 1.8, "frequency_penalty": 1.2, "presence_penalty": 0.9},
    "logit_bias": {"logit_bias": {1: 2.5, 4: -1.0, 6: -np.inf}},
    "allowed_token_ids": {"allowed_token_ids": [0, 2, 3, 5, 7], "min_p": 0.05},
    "bad_words": {},
    "min_tokens": {"min_tokens": NUM_TOKENS + 1, "stop_token_ids": [2, 5], "top_p": 0.95},
}
VERIFIERS: dict[str, tuple[list[Any], str]] = {
    "multi_step": ([1, 2], "2,1"),
    "without_replacement": ([1], "3,2"),
}


def last_two(counts: Mapping[tuple[int, ...], float]) -> Counter[tuple[int, ...]]:
    """Fewer cells, each with more samples: the first token is the prefill's, and no tree's."""
    pairs: Counter[tuple[int, ...]] = Counter()
    for tokens, count in counts.items():
        pairs[tokens[1:]] += count  # type: ignore[assignment]
    return pairs


@pytest.fixture(scope="module")
def made(models: list[Path]) -> dict[str, LLM]:
    return {name: make(models, *settings, name) for name, settings in VERIFIERS.items()}


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_keeps_the_law(
    made: dict[str, LLM], exact: Any, monkeypatch: pytest.MonkeyPatch, name: str, verifier: str
) -> None:
    words = WORDS if name == "bad_words" else []
    monkeypatch.setattr("specinfer.engine.engine.bad_word_tokens", lambda params, tokenizer: words)
    params = replace(PARAMS, top_k=0, **PARAMETERS[name])
    law = exact(params, words)
    assert abs(sum(law.values()) - 1) < 1e-9
    assert law != exact(replace(PARAMS, top_k=0))
    seen, num_accepted = sample(made[verifier], SEEDS, params)
    assert num_accepted > seen.total() / 2
    assert p_value(last_two(seen), last_two(law)) > 1e-3


def test_penalties_that_ignore_the_path_show(
    made: dict[str, LLM], exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(PARAMS, top_k=0, **PARAMETERS["penalties"])
    law = exact(params)
    right = Penalties.apply
    monkeypatch.setattr(Penalties, "apply", lambda self, x, history, path: right(self, x, history, ()))
    seen, _ = sample(made["multi_step"], SEEDS, params)
    assert p_value(last_two(seen), last_two(law)) < 1e-6
