"""Drafts of another tokenizer in a real engine: the tokens are plain decoding's, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from specinfer import LLM, SamplingParams
from specinfer.attention import Span
from specinfer.draft.history import OwnHistories
from specinfer.draft.model import ModelDrafter
from specinfer.draft.retelling import Retelling
from specinfer.runtime import Batch, WorkItem

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
Respell = Callable[..., Path]
# Bytes of words, so that the draft's tokens merge as the text grows.
WORDS = tuple(ALPHABET.index(c) for c in "theanb12.Ġ")
PROMPT = "the ant and the bat ate 12 tab"


@pytest.fixture(scope="module")
def other(respelled_draft: Path) -> Path:
    return respelled_draft


@pytest.fixture(scope="module")
def gpt2(
    tmp_path_factory: pytest.TempPathFactory, sentencepiece: Backend, save_tokenizer: Callable[..., Path]
) -> Path:
    """A draft of another family, with a SentencePiece tokenizer."""
    directory = tmp_path_factory.mktemp("gpt2") / "draft"
    torch.manual_seed(0)
    size = sentencepiece.get_vocab_size()
    GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_embd=32, n_head=4, n_layer=1, n_positions=512)
    ).save_pretrained(directory)
    return save_tokenizer(sentencepiece, directory, bos_token="<s>", unk_token="<unk>")


def engine(target: Path, *drafts: Path | str, **settings: Any) -> LLM:
    return LLM(str(target), drafts=[str(d) for d in drafts], tree="2,2,1", dtype="float32", **settings)


def prompts(llm: LLM) -> list[list[int]]:
    assert llm.engine.tokenizer is not None
    return [llm.engine.tokenizer.encode(PROMPT[start:]) for start in (0, 3, 10, 20)]


def tokens_of(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts(llm), params)
    llm.engine.check_integrity()
    return [o.outputs[0].token_ids for o in outputs]


def some(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def bert(
    tiny_draft: Path, wordpiece: Backend, respell: Respell, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A draft with a WordPiece tokenizer."""
    return respell(tiny_draft, tmp_path_factory.mktemp("bert") / "draft", wordpiece)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_plain_decodings(
    tiny_model: Path, other: Path, gpt2: Path, bert: Path, temperature: float
) -> None:
    """One draft, several of different families and tokenizers, and the pair the other way round."""
    all_bytes, words = some(temperature), some(temperature, allowed_token_ids=WORDS)
    plain = engine(tiny_model)
    expected = [tokens_of(plain, params) for params in (all_bytes, words)]
    for drafts in ([bert], [other, gpt2, "ngram", other]):
        llm = engine(tiny_model, *drafts)
        assert [tokens_of(llm, params) for params in (all_bytes, words)] == expected
        stats = [o.outputs[0].stats for o in llm.generate(prompts(llm), words)]
        assert sum(s.num_accepted_tokens for s in stats) > 0
    assert tokens_of(engine(other, tiny_model), all_bytes) == tokens_of(engine(other), all_bytes)


def test_tokens_that_only_moved(
    tiny_model: Path,
    tiny_draft: Path,
    byte_level: Callable[..., Backend],
    respell: Respell,
    tmp_path: Path,
) -> None:
    """A twin whose ids are shuffled proposes what the draft itself does, from the request's own slots."""
    rng = np.random.default_rng(0)
    backend = byte_level(rng.permutation(ALPHABET).tolist(), [])
    backend.add_tokens(rng.permutation([f"<w{i}>" for i in range(258, 300)]).tolist())
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    moved = respell(tiny_draft, tmp_path / "moved", backend)
    first, second = engine(tiny_model, tiny_draft), engine(tiny_model, moved)
    assert second.engine.own_histories == ()
    for temperature in (0.0, 1.0):
        one, two = (llm.generate(prompts(llm), some(temperature)) for llm in (first, second))
        assert [o.outputs[0].token_ids for o in one] == [o.outputs[0].token_ids for o in two]
        for a, b in zip(one, two, strict=True):
            assert a.outputs[0].stats.accepted_per_depth == b.outputs[0].stats.accepted_per_depth
        assert any(o.outputs[0].stats.num_accepted_tokens for o in two)


def check_kv(drafter: ModelDrafter, histories: OwnHistories) -> int:
    """Compare every cached, filled slot with K/V computed from scratch; returns how many there were."""
    runner = drafter._runner
    pool = runner.pool
    checked = 0
    for leaf in [node for node in histories.prefix_cache.nodes() if not node.children]:
        path = [leaf]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        tokens = np.array([t for node in reversed(path) for t in node.tokens], np.int64)
        slots = np.concatenate([node.slots for node in reversed(path)])
        assert pool.filled[slots].all()
        ours = [t[torch.from_numpy(slots)].clone() for t in (*pool.k, *pool.v)]
        n = len(tokens)
        span = Span(slots[:0], slots, np.arange(-1, n - 1))
        runner.run(Batch.of([WorkItem(span, tokens, np.zeros(0, np.int64))]))
        for tensor, kept in zip((*pool.k, *pool.v), ours, strict=True):
            assert torch.equal(tensor[torch.from_numpy(slots)], kept)
        checked += n
    return checked


@pytest.mark.parametrize("seed", range(3))
def test_slots_through_preemption_and_abort(tiny_model: Path, other: Path, seed: int) -> None:
    """After every step both sides own each slot once; at the end no request holds one."""
    llm = engine(tiny_model, other, max_num_seqs=4, kv_memory=100 * 512, max_step_tokens=20)
    drafter, (histories,) = llm.engine.parts.drafter, llm.engine.own_histories
    assert isinstance(drafter, ModelDrafter)
    assert llm.engine.allocator.num_slots == 100
    rng = np.random.default_rng(seed)
    waiting = prompts(llm) * 2
    requests = []
    checked = num_steps = 0
    while waiting or llm.engine.has_work:
        if waiting and rng.random() < 0.5:
            params = some(float(seed % 2), allowed_token_ids=WORDS)
            requests += llm.engine.add_request(waiting.pop(), params)
        if requests and rng.random() < 0.05:
            llm.engine.abort(requests[int(rng.integers(len(requests)))])
        llm.engine.step()
        llm.engine.check_integrity()
        num_steps += 1
        if num_steps % 8 == 0:
            checked += check_kv(drafter, histories)
    assert llm.engine.parts.scheduler.num_preemptions > 0
    assert checked > 100
    assert histories.prefix_cache.num_evictable == histories.prefix_cache.num_slots > 0


def test_a_round_that_fails_keeps_no_slot(
    tiny_model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the draft's forward: what was not written is not cached, and the tokens stay the same."""
    llm = engine(tiny_model, other)
    drafter, (histories,) = llm.engine.parts.drafter, llm.engine.own_histories
    assert isinstance(drafter, ModelDrafter)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    requests = [llm.engine.add_request(prompt, some(1.0))[0] for prompt in prompts(llm)]
    llm.engine.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(drafter._runner, "run", interrupted)
        llm.engine.step()
    llm.engine.check_integrity()
    assert histories.prefix_cache.num_slots == 0
    while llm.engine.has_work:
        llm.engine.step()
    assert [tuple(r.output_token_ids) for r in requests] == tokens_of(engine(tiny_model), some(1.0))


def test_a_draft_without_room_leaves_the_request_alone(tiny_model: Path, other: Path) -> None:
    """The draft writes more tokens than the target and has slots for as many only: plain decoding, then."""
    target = engine(other, tiny_model, max_num_seqs=1, kv_memory=40 * 512, prefix_cache=False)
    slots = target.engine.allocator.num_slots
    assert target.engine.tokenizer is not None
    prompt = target.engine.tokenizer.encode(" the" * (slots - 10))
    assert len(prompt) == slots - 10
    output = target.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].stats.num_draft_tokens == 0
    target.engine.check_integrity()


@pytest.mark.parametrize("verifier", ["multi_step", "without_replacement"])
def test_the_law_is_the_renormalised_one(tiny_model: Path, other: Path, verifier: str) -> None:
    """q is the draft's own softmax after its own history, over the allowed tokens that both have."""
    llm = engine(tiny_model, other, verifier=verifier)
    own = llm.engine.own_histories[0]._own
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    model = LlamaForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    llm.engine.add_request(prompts(llm)[0], some(1.0, allowed_token_ids=[*WORDS, 256]))
    llm.engine.step()
    request = llm.engine.parts.scheduler.running[0]
    tokens = list(request.tokens)
    told = Retelling(tokenizer, own).tell(tokens)
    assert told is not None and len(told) < len(tokens)
    tree, law = llm.engine.step()[0].proposal
    with torch.inference_mode():
        logits = model(torch.tensor([told])).logits[0, -1].double().numpy()
    expected = np.zeros(300)
    at = {spelling: i for i, spelling in enumerate(own.spellings)}
    for token in WORDS:
        expected[token] = np.exp(logits[at[tokenizer.spellings[token]]])
    np.testing.assert_allclose(law[0, 0], expected / expected.sum(), rtol=1e-4, atol=1e-9)
    assert all(q.sum() == pytest.approx(1.0) for q in law.values())
    assert tree.num_nodes > 1
    assert all(law[c.drafter, int(tree.parents[c.node])][tree.token_ids[c.node]] > 0 for c in tree.candidates)
