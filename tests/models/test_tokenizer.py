"""Tokenizers: SmolLM2's vectors, tiny byte-level and SentencePiece vocabularies, chat templates, errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specinfer.errors import ModelError, RequestError
from specinfer.models.gguf import GGUFFile
from specinfer.models.tokenizer import Tokenizer

# Made by a tokenizers.Tokenizer put together by hand as SmolLM2's published tokenizer.json says: BPE over
# the file's tokens and merges, Digits(individual_digits=True), ByteLevel(add_prefix_space=False).
SMOLLM2_VECTORS = [
    ("Hello, world!", [19556, 28, 905, 17]),
    ("1234", [33, 34, 35, 36]),
    (
        "In 1984, 3.14159 was 2² and ½ of Ⅷ.",
        [788, 216, 33, 41, 40, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41, 436, 216, 34, 19133]
        + [284, 216, 16738, 282, 216, 173, 223, 117, 30],
    ),
    (
        "The quick brown fox doesn't jump; it's 'lazy'.",
        [504, 2365, 6354, 16438, 2761, 982, 7379, 43, 357, 506, 637, 38046, 4289],
    ),
    ("naïve café, Zürich — ümlaut", [3546, 46494, 37366, 28, 1777, 7170, 5130, 1841, 5549, 137, 3566, 1648]),
    (
        "日本語のテキスト",
        [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    ),
    ("Привет, мир", [155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175]),
    (
        "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea",
        [10813, 38887, 10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231]
        + [10813, 235, 116, 15107, 225, 119, 10813, 225, 120],
    ),
    ("line one\nline two\n\n\tindented\r\n", [1311, 582, 198, 1311, 827, 1116, 197, 526, 6574, 2738]),
    (
        "def f(x):\n    if x > 10:\n        return x ** 2  # square\n",
        [1604, 275, 24, 104, 727, 472, 585, 1792, 2986, 216, 33, 32, 42, 448, 1003, 1792, 1903, 216, 34]
        + [216, 907, 5222, 198],
    ),
    ("  leading and trailing  ", [216, 2899, 284, 35079, 256]),
    ("a     b", [81, 289, 278]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("<|endoftext|><repo_name>x", [0, 3, 104]),
    (
        "http://example.com/a?b=1&c=%20",
        [5031, 1742, 7434, 30, 824, 31, 81, 47, 82, 45, 33, 22, 83, 23446, 34, 32],
    ),
    ("\x00\x07\u200b\ufeff", [190, 195, 321, 229, 186, 136, 140]),
    ("HELLO hello HeLLo", [56, 4210, 6426, 33662, 909, 16421, 95]),
    ("", []),
]
# SmolLM2's vocabulary lacks these bytes (and some that UTF-8 never uses): they vanish, there as here.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
CHAT_PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
CHAT_PROMPT += [
    19712,
    8182,
    2,
    198,
    1,
    4093,
    198,
    37964,
    1273,
    22424,
    563,
    14566,
    30,
    2,
    198,
    1,
    520,
    9531,
    198,
]

ROUND_TRIPPING = ["default", "gpt-2", "llama3", "smollm"]  # qwen2 normalises to NFC
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "3 4", "12 3", "h e", "l l", "he ll", "hell o", "Ġ w", "b :"]
BYTE_LEVEL_TOKENS = ["<s>", "</s>", "<tool:x>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁abc", "▁▁", "cab"]
PIECE_SCORES = [-20.0, -21.0, -22.0, -23.0, -1.0, -4.0, -2.0, -3.0, -5.0, -6.0, -7.0, -8.0]
SENTENCEPIECE_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": SENTENCEPIECE_TOKENS,
    "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES),
    "scores": [0.0] * 259 + PIECE_SCORES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}
BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": BYTE_LEVEL_TOKENS,
    "token_type": [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(BYTE_LEVEL_TOKENS) - 3),
    "merges": MERGES,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def gguf_with(path: Path, values: dict[str, Any], template: str | None = None) -> GGUFFile:
    """A GGUF with a tokenizer and the least of a model. A value of None leaves its key out."""
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(8)
    writer.add_block_count(0)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in values.items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def tokenizer_with(path: Path, values: dict[str, Any], template: str | None = None) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_with(path / "tiny.gguf", values, template))


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in ids]


@functools.cache
def smollm2(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(path))


@functools.cache
def smollm2_by_hand(path: Path) -> Backend:
    metadata = GGUFFile(path).metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:17])
    return backend


@pytest.mark.parametrize(("text", "ids"), SMOLLM2_VECTORS)
def test_smollm2_vectors(smollm2_path: Path, text: str, ids: list[int]) -> None:
    tokenizer = smollm2(smollm2_path)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_smollm2_equals_the_published_tokenizer(smollm2_path: Path, text: str) -> None:
    tokenizer = smollm2(smollm2_path)
    ids = tokenizer.encode(text)
    assert ids == smollm2_by_hand(smollm2_path).encode(text).ids
    if not MISSING_BYTES.intersection(text.encode()):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm2_facts(smollm2_path: Path) -> None:
    tokenizer = smollm2(smollm2_path)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)  # add_bos_token is false
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert texts(tokenizer, [2, 28, 905, 222, 49152, -1]) == [
        "<|im_end|>",
        ",",
        " world",
        "<0x84>",
        "<49152>",
        "<-1>",
    ]


def test_smollm2_chat(smollm2_path: Path) -> None:
    tokenizer = smollm2(smollm2_path)
    question = "Describe common misconceptions about mythology."
    assert tokenizer.apply_chat_template([{"role": "user", "content": question}]) == CHAT_PROMPT


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("gpt-2", ["12", "34"]),
        ("default", ["123", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_pre_tokenizers_split_digits(tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokenizer = tokenizer_with(tmp_path, {**BYTE_LEVEL, "pre": pre})
    assert texts(tokenizer, tokenizer.encode("1234", add_special_tokens=False)) == expected


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("byte_level")
    return {pre: tokenizer_with(directory, {**BYTE_LEVEL, "pre": pre}) for pre in ROUND_TRIPPING}


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@pytest.mark.parametrize("pre", ROUND_TRIPPING)
def test_byte_level_round_trip(byte_level: dict[str, Tokenizer], pre: str, text: str) -> None:
    tokenizer = byte_level[pre]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_added_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, BYTE_LEVEL)
    ids = tokenizer.encode("hello<tool:x></s>w")
    assert texts(tokenizer, ids) == ["hello", "<tool:x>", "</s>", "w"]
    assert tokenizer.decode(ids) == "hello<tool:x>w"  # user-defined tokens are text, control tokens are not
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<tool:x></s>w"


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ({"add_eos_token": True, "eos_token_id": 2}, [], [2]),  # a name with a colon in it
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
)
def test_bos_and_eos_flags(
    tmp_path: Path, flags: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = tokenizer_with(tmp_path, {**BYTE_LEVEL, **flags})
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*before, *plain, *after]


def test_several_end_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, {**BYTE_LEVEL, "eot_token_id": 2, "eom_token_id": 1})
    assert tokenizer.eos_token_ids == (1, 2)


def sentencepiece_reference(text: str) -> list[str]:
    """llama.cpp's way: join the neighbours whose union scores best, leftmost first, while there are any."""
    score = dict(zip(PIECES, PIECE_SCORES, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [
            (-score[a + b], i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in score
        ]
        if not unions:
            return pieces
        _, i = min(unions)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("sentencepiece"), SENTENCEPIECE)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc ", min_size=1, max_size=20))
def test_sentencepiece_merges(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert ids[0] == 1
    assert [SENTENCEPIECE_TOKENS[token_id] for token_id in ids[1:]] == sentencepiece_reference(text)
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_bytes_and_specials(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, SENTENCEPIECE)
    assert texts(tokenizer, tokenizer.encode("é\n")) == ["<s>", " ", "<0xC3>", "<0xA9>", "\n"]
    assert tokenizer.decode(tokenizer.encode("é\n🙂 ab")) == "é\n🙂 ab"
    assert texts(tokenizer, tokenizer.encode("ab</s>ab")) == ["<s>", " ab", "</s>", " ab"]
    bare = tokenizer_with(tmp_path, {**SENTENCEPIECE, "add_space_prefix": False, "add_bos_token": False})
    assert texts(bare, bare.encode("ab")) == ["ab"]
    assert bare.decode(bare.encode(" ab")) == " ab"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no bad role') }}{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}he{% endif %}"
)


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, {**BYTE_LEVEL, "add_bos_token": True}, TEMPLATE)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert texts(tokenizer, ids) == ["<s>", "hello", "</s>", "he"]  # one <s>, the template's own
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer_with(tmp_path, BYTE_LEVEL).apply_chat_template([{"role": "user", "content": "hello"}])
    with pytest.raises(RequestError, match="no bad role") as caught:
        tokenizer.apply_chat_template([{"role": "bad", "content": "hello"}])
    assert caught.value.hint


@pytest.mark.parametrize(
    "messages",
    [[], "hello", ["hello"], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": None}]]
    + [[{"role": 1, "content": "x"}], {"role": "user", "content": "x"}],
)
def test_malformed_messages(tmp_path: Path, messages: Any) -> None:
    tokenizer = tokenizer_with(tmp_path, BYTE_LEVEL, TEMPLATE)
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.hint


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tokenised"):
        tokenizer_with(tmp_path, BYTE_LEVEL).encode("half a pair: \ud83d")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "klingon"}, "klingon"),
        ({"model": "bert"}, "bert"),
        ({"model": None}, "None"),
        ({"tokens": None}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["a b c"]}, "pair"),
        ({"merges": ["never seen"]}, "fit together"),
        ({"token_type": [1, 1]}, "token types"),
        ({"model": "llama"}, "score"),
    ],
)
def test_unusable_tokenizers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tokenizer_with(tmp_path, {**BYTE_LEVEL, **changes})
    assert caught.value.hint
    if "pre" in changes:
        assert "smollm" in caught.value.hint and "llama-bpe" in caught.value.hint


def test_from_directory(tmp_path: Path) -> None:
    backend = Backend(BPE(vocab={token: index for index, token in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast
    hf = wrap(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE, model_max_length=8)
    hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 256]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 9}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_token_ids == (256, 7, 9)
    text = "a longer text , with spaces .\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == "xhe"


def test_from_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        Tokenizer.from_directory(tmp_path)
