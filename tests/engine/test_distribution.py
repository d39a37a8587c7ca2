"""The stochastic verifiers: tokens come with the target's own probabilities.

The whole engine makes 800 draws a case. Each parameter alone has 20,000, made by the same pieces without what
an engine does around them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as backends

from specinfer import LLM, SamplingParams, TokenTree
from specinfer.attention import Span
from specinfer.engine.request import Request
from specinfer.runtime import Batch, WorkItem
from specinfer.sampling import Purpose, draw_iid, draw_without_replacement, stream
from specinfer.sampling.penalties import Penalties
from specinfer.tree import Candidate, CandidateKind
from specinfer.verify import Verdict, get_verifier
from specinfer.verify.coin import RandomCoin

LETTERS = "abcdefg"
END = len(LETTERS)
PROMPT = [1, 5, 2]
NUM_TOKENS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": END + 1, "bos_token_id": None, "eos_token_id": END, "tokenizer": False,
    "num_hidden_layers": 1, "scale": 0.9,
}  # fmt: skip
Law = Mapping[tuple[int, ...], float]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, write_model: Any) -> list[Path]:
    """A target over 7 letters and an end token, a draft near it, and another not so near."""
    directory = tmp_path_factory.mktemp("eight")
    target = write_model(directory / "target", **SHAPE)
    weights = load_file(str(target / "model.safetensors"))
    torch.manual_seed(5)
    near = write_model(directory / "near", noise_on=weights, noise=0.3, **SHAPE)
    far = write_model(directory / "far", noise_on=weights, noise=0.8, **SHAPE)
    backend = Tokenizer(backends.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(target / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return [target, near, far]


@pytest.fixture(scope="module")
def exact(models: list[Path]) -> Any:
    """exact(params): {three tokens: their probability}, by feeding every prefix to the target."""
    llm = LLM(str(models[0]), dtype="float32")

    def law(params: SamplingParams) -> Law:
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(NUM_TOKENS):
            items, rows = [], []
            for prefix in found:
                [request] = llm.engine.new_requests(PROMPT, replace(params, n=1))
                request.tokens += prefix
                n, start = len(request.tokens), len(items) * 8
                span = Span(np.zeros(0, np.int64), np.arange(start, start + n), np.arange(-1, n - 1))
                items.append(WorkItem(span, np.array(request.tokens), np.array([n - 1])))
                rows.append(request.row())
            parts = llm.engine.parts
            p = parts.chooser.probabilities(parts.runner.run(Batch.of(items))[0], rows)
            found = {
                (*prefix, token): share * float(row[token])
                for (prefix, share), row in zip(found.items(), p, strict=True)
                for token in np.flatnonzero(row).tolist()
            }
        assert abs(sum(found.values()) - 1) < 1e-9
        return found

    return law


def p_value(seen: Counter[tuple[int, ...]], law: Law) -> float:
    """Chi-square over the cells; rare ones are pooled."""
    if not seen.keys() <= law.keys():
        return 0.0
    num_samples = seen.total()
    rare = [cell for cell in law if num_samples * law[cell] < 5]
    common = [cell for cell in law if num_samples * law[cell] >= 5]
    observed = [seen[c] for c in common] + [sum(seen[c] for c in rare)]
    expected = [num_samples * law[c] for c in common] + [num_samples * sum(law[c] for c in rare)]
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


PARAMS = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS + 1, ignore_eos=True, n=400)


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


PARAMETERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "presence_penalty": {"presence_penalty": -0.9},
    "logit_bias": {"logit_bias": {1: 2.5, 4: -1.0, 6: -np.inf}},
    "allowed_token_ids": {"allowed_token_ids": [0, 2, 3, 5, END]},
    "bad_words": {"bad_words": ["d", "cg", "gg", "beb"]},
    "min_tokens": {"min_tokens": NUM_TOKENS + 1, "stop_token_ids": [2, 5]},
    "grammar": {
        "structured_outputs": {"regex": "(a[bd]|[c-f])([b-f]|g)[ace-g]+"}, "ignore_eos": False
    },
    "all": {
        "top_k": 6, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.3,
        "frequency_penalty": 0.5, "presence_penalty": 0.4, "logit_bias": {1: 1.5}, "bad_words": ["de"],
    },
}  # fmt: skip
VERIFIERS: dict[str, tuple[list[Any], str]] = {
    "multi_step": ([1, 2], "2,1"),
    "without_replacement": ([1], "3,2"),
}


def marginal(counts: Mapping[tuple[int, ...], float], part: slice) -> Counter[tuple[int, ...]]:
    """Of some of the tokens: fewer cells, each with more samples."""
    summed: Counter[tuple[int, ...]] = Counter()
    for tokens, count in counts.items():
        summed[tokens[part]] += count  # type: ignore[assignment]
    return summed


FIRST_TWO, LAST_TWO = slice(2), slice(1, None)


@pytest.fixture(scope="module")
def made(models: list[Path]) -> dict[str, LLM]:
    return {name: make(models, *settings, name) for name, settings in VERIFIERS.items()}


@pytest.mark.parametrize(("name", "verifier"), [("all", "multi_step"), ("grammar", "without_replacement")])
def test_parameters_keep_the_law(made: dict[str, LLM], exact: Any, name: str, verifier: str) -> None:
    """The last two tokens: the first is the prefill's, and no tree's."""
    params = replace(PARAMS, **PARAMETERS[name])
    law = exact(params)
    seen, num_accepted = sample(made[verifier], [21, 22], params)
    assert num_accepted > seen.total() / 2
    assert p_value(marginal(seen, LAST_TWO), marginal(law, LAST_TWO)) > 1e-3


def laws_after(llm: LLM, request: Request) -> Callable[[tuple[int, ...]], np.ndarray]:
    """The law that a model gives a request's next token after a path."""

    @cache
    def law(path: tuple[int, ...]) -> np.ndarray:
        tokens = np.array([*PROMPT, *path])
        n = len(tokens)
        span = Span(np.zeros(0, np.int64), np.arange(n), np.arange(-1, n - 1))
        logits, _ = llm.engine.parts.runner.run(Batch.of([WorkItem(span, tokens, np.array([n - 1]))]))
        return llm.engine.parts.chooser.probabilities(logits, [request.row(path)])[0]

    return law


@pytest.mark.parametrize(("name", "verifier"), list(zip(PARAMETERS, cycle(VERIFIERS), strict=False)))
def test_every_parameter_keeps_the_law(models: list[Path], exact: Any, name: str, verifier: str) -> None:
    """20,000 times two tokens: two children drawn from the draft's law, the verifier's walk, and again where
    it ended at the first."""
    params = replace(PARAMS, **PARAMETERS[name], n=1)
    rule = get_verifier(verifier)
    draw = draw_iid if rule.sampled_kind == CandidateKind.IID else draw_without_replacement
    target, draft = (LLM(str(path), dtype="float32") for path in models[:2])
    [request] = target.engine.new_requests(PROMPT, params)
    p, q = laws_after(target, request), laws_after(draft, request)
    draws = stream(31, 0, 0, Purpose.DRAFT)
    coin = RandomCoin(lambda: stream(31, 0, 0, Purpose.VERIFY))

    @cache
    def tree_of(children: tuple[int, ...]) -> TokenTree:
        tokens = list(dict.fromkeys(children))
        candidates = [
            Candidate(1 + tokens.index(token), 0, i, rule.sampled_kind) for i, token in enumerate(children)
        ]
        return TokenTree.build([0, *tokens], [-1] + [0] * len(tokens), [1.0] * (1 + len(tokens)), candidates)

    @cache
    def rows_of(path: tuple[int, ...], children: tuple[int, ...]) -> np.ndarray:
        return np.stack(
            [p((*path, *tree_of(children).path_tokens(i))) for i in range(tree_of(children).num_nodes)]
        )

    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(20_000):
        tokens: tuple[int, ...] = ()
        while len(tokens) < 2:
            children = tuple(draw(q(tokens), 2, draws))
            tree = tree_of(children)
            verdict = rule.verify(tree, {(0, 0): q(tokens)}, rows_of(tokens, children), coin)
            tokens = (*tokens, *(int(tree.token_ids[node]) for node in verdict.path), verdict.next_token)
        seen[tokens[:2]] += 1
    law = exact(params)
    assert law != exact(PARAMS)
    assert p_value(seen, marginal(law, FIRST_TWO)) > 1e-3


def test_penalties_that_ignore_the_path_show(
    made: dict[str, LLM], exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(PARAMS, repetition_penalty=1.8, frequency_penalty=1.2, presence_penalty=0.9)
    law = exact(params)
    right = Penalties.apply
    monkeypatch.setattr(Penalties, "apply", lambda self, x, history, path: right(self, x, history, ()))
    seen, _ = sample(made["multi_step"], [21, 22], params)
    assert p_value(marginal(seen, LAST_TWO), marginal(law, LAST_TWO)) < 1e-6
