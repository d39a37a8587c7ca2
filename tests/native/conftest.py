"""Native runners over tiny models, and the torch runner they are compared with."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specinfer.models.linear import LinearFactory
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import ModelRunner, make_pool, make_torch_runner
from specinfer.runtime.kept import Keep
from specinfer.runtime.native import NativeRunner, extension

CPU = torch.device("cpu")
NUM_SLOTS = 400


def has_level(level: str) -> bool:
    module = extension()
    try:
        return module is not None and bool(module.level(level))
    except ValueError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if extension() is None:
        for item in items:
            if "tests/native/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="specinfer._cpu was not built"))


def native_runner(
    path: Path,
    weights: torch.dtype = torch.float32,
    kv: torch.dtype = torch.float32,
    level: str = "",
    num_threads: int = 2,
    keep: Keep = "dtype",
) -> NativeRunner:
    if not has_level(level):
        pytest.skip(f"this CPU has no {level}")
    checkpoint = open_checkpoint(path)
    pool = make_pool(checkpoint.config, NUM_SLOTS, kv, CPU)
    return NativeRunner(checkpoint, weights, pool, 512, keep=keep, level=level, num_threads=num_threads)


def torch_runner(path: Path) -> ModelRunner:
    checkpoint = open_checkpoint(path)
    pool = make_pool(checkpoint.config, NUM_SLOTS, torch.float32, CPU)
    return make_torch_runner(checkpoint, LinearFactory(torch.float32, CPU), pool, 512)


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix as GGUF stores it, uint8 [rows, bytes]; blocks at random of what the library does not make."""
    if kind not in ("q4_k", "q6_k"):
        return np.asarray(gguf.quantize(values, gguf.GGMLQuantizationType[kind.upper()]))
    unit_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1]
    rng = np.random.default_rng(zlib.crc32(values.tobytes()))
    raw = rng.integers(0, 256, (values.size // 256, unit_bytes), dtype=np.uint8)
    scales = (values.std() * rng.uniform(0.5, 1.5, (len(raw), 1))).astype(np.float16)
    if kind == "q4_k":  # so that values are about as large, and their mean is about zero
        raw[:, :4] = (scales * np.array([1 / 150, 1 / 20], np.float16)).view(np.uint8)
    else:
        raw[:, -2:] = (scales / np.float16(1300)).view(np.uint8)
    return raw.reshape(len(values), -1)


def as_gguf(directory: Path, kind_of: Callable[[str], str]) -> Path:
    """A tiny model's directory as a GGUF file beside it.

    kind_of: a matrix's name to its type in the file, F32 where its rows are no whole blocks.
    """
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    path = directory.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<w{i}>" for i in range(3, config["vocab_size"]))])
    writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.float().numpy()
        for part, num_heads in ((".q_proj.", heads), (".k_proj.", kv_heads)):
            if part in name:
                halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = kind_of(name) if values.ndim == 2 else "f32"
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][0]:
            kind = "f32"
        writer.add_tensor(
            names.get_name(name, (".weight", ".bias")),
            stored(np.ascontiguousarray(values), kind),
            raw_dtype=gguf.GGMLQuantizationType[kind.upper()],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized_runner(directory: Path, kind: str, level: str = "", num_threads: int = 2) -> NativeRunner:
    """A model in int8, or in GGUF's blocks of a kind, with K/V in bf16."""
    if kind == "int8":
        return native_runner(directory, torch.bfloat16, torch.bfloat16, level, num_threads, "int8")
    path = directory.with_suffix(".gguf")
    if not path.exists():
        as_gguf(directory, lambda _: kind)
    return native_runner(path, torch.bfloat16, torch.bfloat16, level, num_threads, "stored")


class Runners:
    """The helpers above, for tests (importlib mode has no package to import them from)."""

    native = staticmethod(native_runner)
    quantized = staticmethod(quantized_runner)
    torch = staticmethod(torch_runner)
    as_gguf = staticmethod(as_gguf)
    has_level = staticmethod(has_level)
    stored = staticmethod(stored)
    num_slots = NUM_SLOTS


@pytest.fixture(scope="session")
def runners() -> type[Runners]:
    return Runners
