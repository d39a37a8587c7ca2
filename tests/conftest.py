"""Fixtures: tiny random models, drafts that spell their tokens otherwise, and the real model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specinfer.models.catalog import resolve_model_path

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# One thread: a tiny model has nothing to share out, and two threads wait for each other where others compete.
torch.set_num_threads(1)

WriteModel = Callable[..., Path]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("Ġa", "n"), ("a", "b"), ("Ã", "©"), ("1", "2")]
Respell = Callable[..., Path]
ByteLevel = Callable[[Sequence[str], Sequence[tuple[str, str]]], Tokenizer]
SaveTokenizer = Callable[..., Path]
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
TINY_CONFIG: dict[str, Any] = {
    **SMALL,
    "model_type": "llama",
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SMALL_FAMILY: dict[str, Any] = {**SMALL, "pad_token_id": None}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def random_weights(config: dict[str, Any], seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Weights wild enough that a random model's choices depend on its whole context."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads, ff = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["intermediate_size"],
    )

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        sizes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (ff, hidden),
            "mlp.up_proj": (ff, hidden),
            "mlp.down_proj": (hidden, ff),
        }
        for part, size in sizes.items():
            weights[f"{name}.{part}.weight"] = matrix(*size)
            is_attention = part.startswith("self_attn")
            if config.get("attention_bias" if is_attention else "mlp_bias"):
                weights[f"{name}.{part}.bias"] = 0.1 * torch.randn(size[0], generator=generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    return weights


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Bytes, two special tokens and filler words up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    backend.add_tokens([f"<w{i}>" for i in range(258, vocab_size)])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def write_draft_vocab(directory: Path) -> None:
    """200 of 300 tokens."""
    d2t = torch.from_numpy(np.random.default_rng(0).permutation(300)[:200]).to(torch.int32)
    save_file({"d2t": d2t}, str(directory / "draft_vocab.safetensors"))


@pytest.fixture(scope="session")
def write_model() -> WriteModel:
    """write_model(directory, seed=0, scale=..., tokenizer=True, like=(directory, noise), **config changes).

    like: start from another model's weights plus noise, to get a draft that sometimes agrees.
    """

    def write(
        directory: Path,
        *,
        seed: int = 0,
        scale: float = 2.0,
        tokenizer: bool = True,
        noise_on: dict[str, torch.Tensor] | None = None,
        noise: float = 0.0,
        **changes: Any,
    ) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        config = {**TINY_CONFIG, **changes}
        (directory / "config.json").write_text(json.dumps(config))
        weights = random_weights(config, seed, scale)
        if noise_on is not None:
            weights = {
                name: noise_on[name] + noise * noise_on[name].std() * torch.randn_like(w)
                for name, w in weights.items()
            }
        save_file(weights, str(directory / "model.safetensors"))
        if tokenizer:
            write_tokenizer(directory, config["vocab_size"])
        return directory

    return write


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, write_model: WriteModel) -> Path:
    """A random two-layer Llama with 300 tokens, a tokenizer and a chat template; 512 positions."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory, write_model: WriteModel) -> Path:
    """A draft for `tiny_model`: its first layer, disturbed, so that it is right now and then."""
    torch.manual_seed(7)
    return write_model(
        tmp_path_factory.mktemp("models") / "draft",
        noise_on=random_weights(TINY_CONFIG, 0, 2.0),
        noise=0.15,
        tokenizer=False,
    )


@pytest.fixture(scope="session")
def other_draft(tmp_path_factory: pytest.TempPathFactory, write_model: WriteModel) -> Path:
    """A second draft that works on a subset of the vocabulary, in its head and its embedding."""
    torch.manual_seed(8)
    directory = write_model(
        tmp_path_factory.mktemp("models") / "other",
        seed=3,
        tokenizer=False,
        vocab_size=200,
        num_hidden_layers=1,
    )
    write_draft_vocab(directory)
    return directory


@pytest.fixture(scope="session")
def feature_draft(tmp_path_factory: pytest.TempPathFactory, write_model: WriteModel) -> Path:
    """A draft for `tiny_model` that reads its hidden rows, and says 200 of its tokens."""
    directory = write_model(
        tmp_path_factory.mktemp("models") / "features",
        seed=5,
        tokenizer=False,
        vocab_size=200,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )
    weights = load_file(str(directory / "model.safetensors"))
    del weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(6)
    weights["features.weight"] = torch.randn(32, 64, generator=generator)
    save_file(weights, str(directory / "model.safetensors"))
    write_draft_vocab(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The built-in target, downloaded on first use."""
    return resolve_model_path("smollm2-135m")


def family_config(model_type: str, **changes: Any) -> Any:
    """A transformers configuration of a two-layer model."""
    from transformers import AutoConfig  # takes seconds

    if model_type in FAMILY_SIZES:
        common = {
            key: SMALL_FAMILY[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        }
        sizes = {**common, **FAMILY_SIZES[model_type]}
    else:
        sizes = {**SMALL_FAMILY, "head_dim": 8}
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


@pytest.fixture(scope="session")
def write_family() -> Callable[..., tuple[Path, Any]]:
    """write_family(directory, model_type, **config changes): a random model, saved and in memory (fp32)."""

    def write(directory: Path, model_type: str, **changes: Any) -> tuple[Path, Any]:
        from transformers import AutoModelForCausalLM  # takes seconds

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(family_config(model_type, **changes)).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Wild enough that logits depend on the whole context.
                noise = torch.randn_like(parameter)
                if parameter.ndim == 1:
                    parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))
                else:
                    is_table = "emb" in name or "wte" in name or "wpe" in name
                    parameter.copy_(noise if is_table else 1.5 * noise / parameter.shape[1] ** 0.5)
        model.save_pretrained(directory)
        return directory, model

    return write


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


def _wordpiece() -> Tokenizer:
    chars = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = ["[UNK]", *chars, *(f"##{c}" for c in chars), *".,", "the", "an", "12", "##nd"]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens(["[UNK]"])
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
def wordpiece() -> Tokenizer:
    """What BERT has: words and their parts, no spaces."""
    return _wordpiece()


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


@pytest.fixture(scope="session")
def respelled_draft(
    tmp_path_factory: pytest.TempPathFactory, tiny_draft: Path, respell: Respell, spelled_otherwise: Tokenizer
) -> Path:
    """`tiny_draft`, made to speak another tokenizer."""
    return respell(tiny_draft, tmp_path_factory.mktemp("models") / "respelled", spelled_otherwise)
