"""ModelDrafter in a real engine: its trees against the draft model by itself, and what they cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from specinfer import LLM, Expansion, SamplingParams, TokenTree
from specinfer.draft.drafter import DraftContext, Drafter, Proposal
from specinfer.draft.ensemble import EnsembleDrafter
from specinfer.draft.model import ModelDrafter
from specinfer.runtime import Batch
from specinfer.sampling.noise import gumbel
from specinfer.sampling.row import Row
from specinfer.tree import CandidateKind, Level

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Drafted(NamedTuple):
    """One proposal, and what the request's tokens were."""

    tokens: list[int]
    tree: TokenTree
    context: DraftContext


@contextmanager
def watched(llm: LLM) -> Iterator[tuple[list[list[Drafted]], list[list[Batch]]]]:
    """Per step: the proposals that were asked for, and the draft's forwards."""
    drafter = llm.engine.parts.drafter
    assert isinstance(drafter, ModelDrafter)
    drafted: list[list[Drafted]] = []
    batches: list[list[Batch]] = []
    launch, run = drafter.launch, drafter._runner.run

    def watched_run(batch: Batch, *args: Any) -> Any:
        batches[-1].append(batch)
        return run(batch, *args)

    def watched_launch(contexts: Any, topology: Any) -> list[Proposal]:
        batches.append([])
        proposals = launch(contexts, topology)
        drafted.append([Drafted(list(c.tokens), p.tree, c) for c, p in zip(contexts, proposals, strict=True)])
        return proposals

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "launch", watched_launch)
        patch.setattr(drafter._runner, "run", watched_run)
        yield drafted, batches


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, 256, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def reference(tiny_draft: Path) -> Callable[[list[int]], torch.Tensor]:
    """The draft's logits after a sequence, by transformers, in fp32."""
    model = LlamaForCausalLM.from_pretrained(tiny_draft, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0, -1]

    return logits


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tiny_draft: Path) -> LLM:
    return LLM(str(tiny_model), drafts=[str(tiny_draft)], tree="3,2,1", dtype="float32", prefix_cache=False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_children_are_the_drafts_own_best(llm: LLM, reference: Any, temperature: float) -> None:
    """At T = 0 its top-k; above it the top-k under the target's noise row of that position."""
    params = SamplingParams(temperature=temperature, seed=9, max_tokens=12, ignore_eos=True)
    with watched(llm) as (drafted, _):
        llm.generate(prompts(5, 11), params)
    trees = [d for step in drafted for d in step]
    assert len(trees) > 5
    widths = (3, 2, 1)
    for tokens, tree, context in trees:
        assert tree.max_depth == min(3, context.max_depth)
        for node in range(tree.num_nodes):
            if tree.depths[node] == tree.max_depth:
                assert tree.children[node] == ()
                continue
            path = tree.path_tokens(node)
            scores = reference([*tokens, *path])
            if temperature:
                key = (9, 0, len(tokens) + len(path))
                scores = scores / temperature + gumbel([key], 300)[0]
            best = scores.topk(widths[tree.depths[node]]).indices.tolist()
            assert [int(tree.token_ids[c]) for c in tree.children[node]] == best
        assert all(c.kind == CandidateKind.DETERMINISTIC for c in tree.candidates)


def test_one_forward_per_depth_for_the_whole_batch(llm: LLM) -> None:
    with watched(llm) as (drafted, batches):
        llm.generate(prompts(4, 9, 14), GREEDY)
    full = [
        forwards
        for step, forwards in zip(drafted, batches, strict=True)
        if len(step) == 3 and all(d.tree.max_depth == 3 for d in step)
    ]
    assert len(full) >= 2
    for forwards in full:
        assert [len(batch.logits_rows) for batch in forwards] == [3, 9, 18]
    assert all(len(forwards) <= 3 for forwards in batches)


def test_committed_tokens_are_fed_once(llm: LLM) -> None:
    """The prompt in the first round; then only what was committed since, the root of that round included."""
    with watched(llm) as (drafted, batches):
        llm.generate(prompts(30), GREEDY)
    before = 0
    for step, forwards in zip(drafted, batches, strict=True):
        (d,) = step
        assert len(forwards[0].token_ids) == len(d.tokens) - max(0, before - 1)
        assert [len(b.token_ids) for b in forwards[1:]] == [len(b.logits_rows) for b in forwards[1:]]
        before = len(d.tokens)
    assert len(drafted) > 2


def test_the_topology_is_told_of_prompts_to_read(tiny_model: Path, tiny_draft: Path) -> None:
    levels: list[tuple[int, bool]] = []

    class Recording(Expansion):
        def expand(self, level: Level) -> Any:
            levels.append((level.depth, level.is_behind is not None and bool(level.is_behind.any())))
            return super().expand(level)

    llm = LLM(str(tiny_model), drafts=[str(tiny_draft)], tree=Recording(1, 1), dtype="float32")
    for length, is_behind in ((40, True), (4, False)):
        levels.clear()
        llm.generate(prompts(length), GREEDY)
        assert levels[:2] == [(0, is_behind), (1, False)]
        assert not any(behind for _, behind in levels[1:])


def test_a_prefix_hit_of_the_target_is_one_of_the_draft(tiny_model: Path, tiny_draft: Path) -> None:
    caching = LLM(str(tiny_model), drafts=[str(tiny_draft)], tree="1,1", dtype="float32")
    first = caching.generate(prompts(40), GREEDY)[0].outputs[0]
    with watched(caching) as (_, batches):
        again = caching.generate(prompts(40), GREEDY)[0].outputs[0]
    assert again.stats.num_cached_tokens == 39
    assert again.token_ids == first.token_ids
    assert len(batches[0][0].token_ids) <= 3


@pytest.mark.parametrize("limit", [1024, 20])
def test_what_requests_share_is_read_once(
    tiny_model: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Samples of one prompt: the target has computed it once when they all come to be drafted for."""
    monkeypatch.setattr("specinfer.draft.model.CATCH_UP_TOKENS", 16)
    monkeypatch.setattr("specinfer.draft.model.MAX_FORWARD_TOKENS", limit)
    params = SamplingParams(temperature=0, n=4, max_tokens=6, ignore_eos=True)
    answers = []
    for drafts in ([], [str(tiny_draft)]):
        llm = LLM(str(tiny_model), drafts=drafts, tree="2,1", dtype="float32")
        if drafts:
            with watched(llm) as (drafted, batches):
                answers.append([o.token_ids for o in llm.generate(prompts(60), params)[0].outputs])
        else:
            answers.append([o.token_ids for o in llm.generate(prompts(60), params)[0].outputs])
    assert answers[0] == answers[1]
    assert max(len(step) for step in drafted) == 4
    forwards = [batch for step in batches for batch in step]
    assert sum(s.num_tokens for b in forwards for s in b.spans if len(s.context_slots) < 59) < 70
    assert max(len(batch.token_ids) for batch in forwards) <= max(limit, 16)
    for step in drafted:  # same tokens, same trees
        for one in step:
            twin = next(d for d in step if d.tokens == one.tokens)
            assert one.tree.token_ids.tolist() == twin.tree.token_ids.tolist()


def test_a_subset_is_caught_up_with_in_chunks_by_torch(
    tiny_model: Path, write_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head is narrower than its embedding; forwards without logits must not matter."""
    monkeypatch.setenv("SPECINFER_CPU", "off")
    monkeypatch.setattr("specinfer.draft.model.CATCH_UP_TOKENS", 16)
    path = write_model(tmp_path / "draft", tokenizer=False, tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    kept = torch.arange(40, 140)
    save_file(
        {**weights, "lm_head.weight": weights["lm_head.weight"][kept].clone()}, path / "model.safetensors"
    )
    save_file({"d2t": kept.to(torch.int32)}, path / "draft_vocab.safetensors")
    answers = []
    for drafts in ([], [str(path)]):
        llm = LLM(str(tiny_model), drafts=drafts, tree="2,1", dtype="float32")
        answers.append(llm.generate(prompts(50, 7), GREEDY))
    assert [r.outputs[0].token_ids for r in answers[0]] == [r.outputs[0].token_ids for r in answers[1]]
    assert all(r.outputs[0].stats.num_draft_tokens for r in answers[1])


def test_long_catch_up_comes_in_chunks(llm: LLM, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.draft.model.CATCH_UP_TOKENS", 16)
    with watched(llm) as (drafted, batches):
        llm.generate(prompts(50, 3), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    tokens, tree, _ = next(d for step in drafted for d in step if len(d.tokens) > 50)
    best = reference(tokens).topk(3).indices.tolist()
    assert [int(tree.token_ids[c]) for c in tree.children[0]] == best
    assert max(s.num_tokens for step in batches for batch in step for s in batch.spans) == 16


def test_prompts_longer_than_the_drafts_context(tiny_model: Path, write_model: Any, tmp_path: Path) -> None:
    """Such a request goes on with its root alone, the others still draft; one grows out of it as it goes."""
    draft = write_model(tmp_path / "short", tokenizer=False, max_position_embeddings=32)
    llm = LLM(str(tiny_model), drafts=[str(draft)], tree="2,2,1", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(str(tiny_model), dtype="float32").generate(prompts(40, 6, 25), params)
    with watched(llm) as (drafted, batches):
        outputs = llm.generate(prompts(40, 6, 25), params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    long, short, growing = (o.outputs[0].stats for o in outputs)
    assert long.num_draft_tokens == 0
    # The draft is the target's twin: every tree but one cut by max_tokens brings its whole depth.
    assert short.acceptance_length > 3
    assert growing.num_draft_tokens > 0
    for d in (d for step in drafted for d in step):
        assert len(d.tokens) + d.tree.max_depth <= 32 or d.tree.num_nodes == 1
    assert all(int(batch.positions.max()) < 32 for step in batches for batch in step)


def test_a_subset_of_the_vocabulary(tiny_model: Path, other_draft: Path) -> None:
    d2t = load_file(str(other_draft / "draft_vocab.safetensors"))["d2t"].tolist()
    llm = LLM(str(tiny_model), drafts=[str(other_draft)], tree="3,2", dtype="float32")
    with watched(llm) as (drafted, batches):
        llm.generate(prompts(12), GREEDY)
    to_draft = [d2t.index(t) if t in d2t else 0 for t in range(300)]
    model = LlamaForCausalLM.from_pretrained(other_draft, dtype=torch.float32).eval()
    for step, forwards in zip(drafted, batches, strict=True):
        (d,) = step
        fed = forwards[0].token_ids.tolist()
        assert fed == [to_draft[t] for t in d.tokens[-len(fed) :]]
        assert set(d.tree.token_ids[1:].tolist()) <= set(d2t)
        with torch.inference_mode():
            logits = model(torch.tensor([[to_draft[t] for t in d.tokens]])).logits[0, -1]
        best = [d2t[i] for i in logits.topk(3).indices.tolist()]
        assert [int(d.tree.token_ids[c]) for c in d.tree.children[0]] == best
    assert any(t not in d2t for t in drafted[0][0].tokens), "the prompt has tokens outside the subset"


def test_nothing_grows_below_an_end_token(llm: LLM) -> None:
    even = tuple(range(0, 300, 2))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=even)
    num_ends = 0
    with watched(llm) as (drafted, _):
        llm.generate(prompts(*range(3, 15)), params)
    for d in (d for step in drafted for d in step):
        for node in range(1, d.tree.num_nodes):
            is_end = d.tree.token_ids[node] % 2 == 0
            num_ends += is_end
            if d.tree.depths[node] < d.tree.max_depth:
                assert bool(d.tree.children[node]) != is_end
    assert num_ends > 10


@pytest.mark.parametrize("max_depth", [1, 2, 3])
@pytest.mark.parametrize("max_nodes", [1, 2, 3, 5, 9, 50])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_limits(llm: LLM, max_depth: int, max_nodes: int, temperature: float) -> None:
    drafter = llm.engine.parts.drafter
    assert isinstance(drafter, ModelDrafter)
    params = SamplingParams(temperature=temperature)
    tokens = [5, 6, 7, 8]
    row = Row(params, 1, 0, 4, 4, (), tokens)
    context = DraftContext(tokens, np.arange(3), row, max_depth, max_nodes)
    roomy = DraftContext(tokens, np.arange(3), row, 3, 16)
    (tree, _), (other, _) = drafter.collect(drafter.launch([context, roomy], Expansion(3, 2, 1)))
    drafter._runner.pool.filled[:3] = False
    full = {1: 4, 2: 10, 3: 16}[max_depth]
    assert tree.num_nodes == min(max_nodes, full)
    assert tree.max_depth <= max_depth
    assert other.num_nodes == 16
    paths = {other.path_tokens(node) for node in range(16)}
    assert {tree.path_tokens(node) for node in range(tree.num_nodes)} <= paths


# Vocabularies that differ by padding.


def padded(source: Path, directory: Path, vocab_size: int) -> Path:
    """`source` with a longer vocabulary, whose new tokens would win everywhere."""
    shutil.copytree(source, directory)
    weights = load_file(str(source / "model.safetensors"))
    extra = vocab_size - len(weights["lm_head.weight"])
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        generator = torch.Generator().manual_seed(1)
        rows = 3 * torch.randn(extra, weights[name].shape[1], generator=generator)
        weights[name] = torch.cat([weights[name], rows])
    save_file(weights, str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    return directory


def trees_of(llm: LLM, params: SamplingParams) -> list[list[Any]]:
    with watched(llm) as (drafted, _):
        llm.generate(prompts(7, 12), params)
    return [[t.tolist() for t in (d.tree.token_ids, d.tree.parents)] for step in drafted for d in step]


@pytest.mark.parametrize("verifier", ["coupled", "multi_step", "without_replacement"])
def test_a_draft_padded_further_than_the_target(
    tiny_model: Path, tiny_draft: Path, tmp_path: Path, verifier: str
) -> None:
    """Its padding is never proposed: the trees are those of the draft without it."""
    wide = padded(tiny_draft, tmp_path / "wide", 333)
    models = [
        LLM(str(tiny_model), drafts=[str(d)], tree="2,2", dtype="float32", verifier=verifier)
        for d in (tiny_draft, wide)
    ]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)
        expected, got = (trees_of(llm, params) for llm in models)
        assert got == expected
        assert len(got) > 4
    for llm in models:
        llm.engine.check_integrity()


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize("verifier", ["coupled", "multi_step"])
def test_a_target_padded_further_than_the_draft(
    tiny_model: Path, tiny_draft: Path, tmp_path: Path, verifier: str, has_tokenizer: bool
) -> None:
    """Tokens that only the target has are fed as the draft's token 0, and decoding goes on."""
    target = padded(tiny_model, tmp_path / "target", 320)
    draft = shutil.copytree(tiny_draft, tmp_path / "draft")
    if has_tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model / file, draft / file)
    params = SamplingParams(temperature=1, seed=3, max_tokens=30, ignore_eos=True)
    llm = LLM(str(target), drafts=[str(draft)], tree="2,2", dtype="float32", verifier=verifier)
    with watched(llm) as (drafted, batches):
        outputs = llm.generate(prompts(7, 12), params)
    tokens = [t for o in outputs for t in o.outputs[0].token_ids]
    assert any(t >= 300 for t in tokens), "the target never used its padding"
    assert all(int(b.token_ids.max()) < 300 for step in batches for b in step)
    assert all((d.tree.token_ids[1:] < 300).all() for step in drafted for d in step)
    if verifier == "coupled":
        plain = LLM(str(target), dtype="float32").generate(prompts(7, 12), params)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


def test_drafts_of_an_ensemble_draw_with_noise_of_their_own(tiny_model: Path, tiny_draft: Path) -> None:
    """The same draft twice: with one stream for both, its draws would be the same ones."""
    llm = LLM(str(tiny_model), drafts=[str(tiny_draft)] * 2, tree="2", dtype="float32", verifier="multi_step")
    drafter: Drafter | None = llm.engine.parts.drafter
    assert isinstance(drafter, EnsembleDrafter)
    differs = 0
    for seed in range(8):
        request = llm.engine.add_request(prompts(6)[0], SamplingParams(seed=seed, max_tokens=6))[0]
        llm.engine.step()
        if request.finish_reason is None:
            tree = llm.engine.step()[0].proposal.tree
            draws: dict[int, list[int]] = {0: [], 1: []}
            for c in tree.candidates:
                if tree.depths[c.node] == 1:
                    draws[c.drafter].append(int(tree.token_ids[c.node]))
            assert [len(d) for d in draws.values()] == [2, 2]
            differs += draws[0] != draws[1]
        llm.engine.abort(request)
    assert differs >= 2
