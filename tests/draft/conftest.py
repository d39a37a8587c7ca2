"""Drafts that spell their tokens otherwise than the tiny target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("Ġa", "n"), ("a", "b"), ("Ã", "©"), ("1", "2")]
Respell = Callable[..., Path]
ByteLevel = Callable[[Sequence[str], Sequence[tuple[str, str]]], Tokenizer]
SaveTokenizer = Callable[..., Path]


def _byte_level(pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece() -> Tokenizer:
    merges = [("\u2581", "a"), ("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "b"), ("1", "2")]
    chars = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,12é\n"]
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), *chars, *("".join(m) for m in merges)]
    vocab = {p: i for i, p in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def _save_tokenizer(backend: Tokenizer, directory: Path, **named: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def byte_level() -> ByteLevel:
    """byte_level(pieces, merges): byte-level BPE over these pieces, in this order."""
    return _byte_level


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """What Llama 2 has: BOS, bytes to fall back on, words with their space."""
    return _sentencepiece()


@pytest.fixture(scope="session")
def save_tokenizer() -> SaveTokenizer:
    """save_tokenizer(tokenizer, directory, bos_token=..., ...): beside a model's weights, or alone."""
    return _save_tokenizer


@pytest.fixture(scope="session")
def spelled_otherwise() -> Tokenizer:
    """The bytes in another order, with merges and another special token."""
    merged = ["".join(m) for m in MERGES]
    backend = _byte_level([*merged, *ALPHABET[::-1]], MERGES)
    backend.add_special_tokens(["<other>", "<|end|>"])
    return backend


@pytest.fixture(scope="session")
def respell(tiny_model: Path) -> Respell:
    """respell(source, directory, tokenizer): the model `source`, which speaks the tiny target's tokens, made
    to speak a tokenizer's: rows of the tokens that both have are moved, and new ones drawn."""
    pieces = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab()

    def write(source: Path, directory: Path, backend: Tokenizer) -> Path:
        shutil.copytree(source, directory)
        _save_tokenizer(backend, directory)
        own = backend.get_vocab()
        weights = load_file(str(source / "model.safetensors"))
        generator = torch.Generator().manual_seed(3)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            old = weights[name]
            new = old.std() * torch.randn(len(own), old.shape[1], generator=generator)
            for piece, token in own.items():
                if piece in pieces:
                    new[token] = old[pieces[piece]]
            weights[name] = new
        save_file(weights, str(directory / "model.safetensors"))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "vocab_size": len(own)}))
        return directory

    return write
