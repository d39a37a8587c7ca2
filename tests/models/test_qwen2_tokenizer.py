"""A GGUF's `qwen2` pre-tokenizer against transformers' Qwen2 tokenizer, over the same tokens and merges."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from specinfer.models.gguf import GGUFFile
from specinfer.models.tokenizer import Tokenizer

MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "Ġ 1",
    "' s",
    "Ċ Ċ",
    "! !",
    "Ġ Ġ",
    "i n",
    "in g",
    "1 2",
    "1 1",
]
TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
END = "<|endoftext|>"
VECTORS = [
    "hello world's HELLO'S",
    "12 + 11 = 23,  1112",
    "in\r\n\r\n  ing\n\n\n x \t!!\n",
    "cafe\u0301 naïve Ⅷ ½ 東京 🙂",
    f"hello{END}hell",
]
LETTERS = st.sampled_from("hello wing's12!\n\r\t\u0301éⅧ東🙂") | st.characters(exclude_categories=["Cs"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Qwen2Tokenizer]:
    path = tmp_path_factory.mktemp("qwen2") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(8)
    writer.add_block_count(0)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*TOKENS, END])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(len(TOKENS))
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vocab = {token: i for i, token in enumerate([*TOKENS, END])}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in MERGES])
    return Tokenizer.from_gguf(GGUFFile(path)), theirs


@pytest.mark.parametrize("text", VECTORS)
def test_vectors(pair: tuple[Tokenizer, Qwen2Tokenizer], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@settings(max_examples=100)
@given(text=st.text(LETTERS, max_size=40))
def test_any_text(pair: tuple[Tokenizer, Qwen2Tokenizer], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
