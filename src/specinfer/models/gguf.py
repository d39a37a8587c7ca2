"""GGUF files: metadata, the configuration in Hugging Face's words, and dequantised weights.

Block sizes and dequantisation are the `gguf` library's; its reader of headers is not used (gguf_header.py).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.errors import ModelError
from specinfer.models.gguf_header import Header, Malformed
from specinfer.models.weights import FEATURES, missing_tensor

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_FETCH_AGAIN = "the file is corrupt or was cut short: delete it and fetch it again"

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Read into rope_parameters, derived data that older converters wrote, or a draft's vocabulary.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?|d2t")


_FAULT_AROUND = 1 << 16
"""Linux maps so many bytes around a page that is asked for, if it has them."""


class _Tensor(NamedTuple):
    shape: tuple[int, ...]  # in torch's order
    quant: gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """One GGUF file: metadata, a Hugging Face configuration, and a WeightSource.

    Raises ModelError for what is not a GGUF, is damaged or truncated, or is of an architecture or a
    tensor type that is not supported; all of it when the file is opened, not when it is used.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._data = self._map()
        self._tensors: dict[str, _Tensor] = {}
        self.metadata: dict[str, Any] = {}
        try:
            self._parse()
        except (Malformed, UnicodeDecodeError, struct.error, OverflowError) as error:
            raise ModelError(f"{self.path} is not a whole GGUF file: {error}", hint=_FETCH_AGAIN) from error
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"{self.path} holds a model of architecture {self.architecture!r}, which is not supported",
                hint=f"supported in GGUF: {', '.join(SUPPORTED_ARCHITECTURES)}",
            )
        self._check_tensors()
        try:
            self._config = self._read_config()
        except (TypeError, ValueError) as error:  # a key of the wrong type
            raise ModelError(f"{self.path}: its metadata is damaged: {error}", hint=_FETCH_AGAIN) from error
        self._stored_as = self._rename()

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def config(self) -> dict[str, Any]:
        """The keys and values of a Hugging Face configuration. Architecture llama with a sliding window is
        model type mistral.

        `rope_parameters` may also carry `freq_factors` (fp32 `[head_dim / 2]`): what each rotary frequency
        is to be divided by. A GGUF has the factors but not the llama3 parameters they were made from.
        """
        return {**self._config, "rope_parameters": dict(self._config["rope_parameters"])}

    def names(self) -> Collection[str]:
        """Hugging Face names of the tensors in the file."""
        return self._stored_as.keys()

    def get(self, name: str) -> torch.Tensor:
        """The tensor in fp32, rows in Hugging Face's order. Raises ModelError if it is missing."""
        return self._in_order(name, self._dequantize(self._stored_name(name)))

    def draft_vocab(self) -> NDArray[np.int64] | None:
        """`d2t` of a draft on a subset of its target's vocabulary: [draft vocabulary] target token ids."""
        tensor = self._tensors.get("d2t")
        if tensor is None:
            return None
        if tensor.quant != gguf.GGMLQuantizationType.I32:
            raise ModelError(f"{self.path}: d2t is of type {tensor.quant.name}, not I32", hint=_FETCH_AGAIN)
        return self._read(tensor).view(np.int32).astype(np.int64)

    def stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type a tensor is stored in, "F32" or "Q4_1" for instance, and its shape. Raises ModelError."""
        tensor = self._tensors[self._stored_name(name)]
        return str(tensor.quant.name), tensor.shape

    def blocks(self, name: str) -> torch.Tensor:
        """A matrix as the file stores it, uint8 `[rows, bytes of a row]`, rows in the order of `get`'s."""
        tensor = self._tensors[self._stored_name(name)]
        return self._in_order(name, torch.from_numpy(self._read(tensor).reshape(tensor.shape[0], -1)))

    def _stored_name(self, name: str) -> str:
        if name not in self._stored_as:
            raise missing_tensor(name, self.path)
        return self._stored_as[name]

    def _in_order(self, name: str, values: torch.Tensor) -> torch.Tensor:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self.architecture != "llama":  # the converter reorders q and k of this one alone
            return values
        return self._unpermute(name, values, self._config[heads])

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelError(
                        f"{self.path} is not a GGUF file: it does not start with the letters GGUF",
                        hint="name a .gguf file or a Hugging Face model directory",
                    )
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelError(f"there is no file {self.path}", hint="check the path") from error
        except OSError as error:
            raise ModelError(
                f"cannot read {self.path}: {error.strerror}", hint="name a readable .gguf file"
            ) from error

    def _parse(self) -> None:
        header = Header(self._data)
        header.position = 4
        (version,) = header.unpack("I")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            what = "is big-endian" if big_endian else f"is of GGUF version {version}"
            raise ModelError(
                f"{self.path} {what}, which is not supported",
                hint="convert the model again with a current llama.cpp; versions 2 and 3 are read",
            )
        num_tensors, num_values = header.unpack("QQ")
        for _ in range(num_values):
            key = header.string()
            (kind,) = header.unpack("I")
            self.metadata[key] = header.value(kind)
        found = []
        for _ in range(num_tensors):
            name = header.string()
            (num_dims,) = header.unpack("I")
            if num_dims > 4:
                raise Malformed(f"tensor {name!r} claims {num_dims} dimensions")
            dims = header.unpack(f"{num_dims}Q")
            quant, offset = header.unpack("IQ")
            found.append((name, tuple(reversed(dims)), quant, offset))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise Malformed(f"its alignment is {alignment}")
        data_start = -(-header.position // alignment) * alignment
        for name, shape, quant, offset in found:
            self._tensors[name] = self._locate(name, shape, quant, data_start + offset)

    def _locate(self, name: str, shape: tuple[int, ...], quant_id: int, offset: int) -> _Tensor:
        try:
            quant = gguf.GGMLQuantizationType(quant_id)
            block_len, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        except (ValueError, KeyError):
            raise self._unsupported(name, f"number {quant_id}") from None
        if not shape or 0 in shape or shape[-1] % block_len:
            raise Malformed(f"tensor {name!r} of shape {shape} is not made of whole {quant.name} blocks")
        num_bytes = math.prod(shape) // block_len * block_bytes
        if offset + num_bytes > len(self._data):
            raise Malformed(
                f"tensor {name!r} ends at byte {offset + num_bytes}, the file at {len(self._data)}"
            )
        return _Tensor(shape, quant, offset, num_bytes)

    def _check_tensors(self) -> None:
        for quant in {tensor.quant for name, tensor in self._tensors.items() if name != "d2t"}:
            _, block_bytes = gguf.GGML_QUANT_SIZES[quant]
            try:
                gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quant)
            except NotImplementedError:
                name = next(name for name, tensor in self._tensors.items() if tensor.quant == quant)
                raise self._unsupported(name, quant.name) from None

    def _unsupported(self, name: str, quant: str) -> ModelError:
        return ModelError(
            f"{self.path}: tensor {name!r} is of type {quant}, which is not supported",
            hint="use a file quantised as Q4_0 to Q8_0, K-quants, IQ-quants, F16, BF16 or F32",
        )

    def _dequantize(self, stored_name: str) -> torch.Tensor:
        tensor = self._tensors[stored_name]
        values = gguf.dequantize(self._read(tensor).reshape(-1, _row_bytes(tensor)), tensor.quant)
        return torch.from_numpy(values.reshape(tensor.shape))

    def _read(self, tensor: _Tensor) -> NDArray[np.uint8]:
        """A copy of a tensor's bytes. The memory of the pages that it was read from is given back."""
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset).copy()
        if hasattr(mmap, "MADV_DONTNEED"):
            start = max(0, tensor.offset - _FAULT_AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            end = min(len(self._data), tensor.offset + tensor.num_bytes + _FAULT_AROUND)
            self._data.madvise(mmap.MADV_DONTNEED, start, end - start)
        return raw

    def _unpermute(self, name: str, values: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Rows of q or k from llama.cpp's order (rotary pairs adjacent) to Hugging Face's (halves).

        `values` is `[num_heads * head_dim, ...]`: a matrix, its blocks or a bias.
        """
        head_dim = self._config["head_dim"]
        if values.shape[0] != num_heads * head_dim:
            raise ModelError(
                f"{self.path}: {name} has {values.shape[0]} rows for {num_heads} heads of {head_dim}",
                hint=_FETCH_AGAIN,
            )
        pairs = values.view(num_heads, head_dim // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape).contiguous()

    def _rename(self) -> dict[str, str]:
        stored_as: dict[str, str] = {}
        layer_names = _LAYER_NAMES | (_QWEN3_NAMES if self.architecture == "qwen3" else {})
        for stored in self._tensors:
            if _NOT_WEIGHTS.fullmatch(stored):
                continue
            base, _, kind = stored.rpartition(".")
            match = _LAYER_TENSOR.fullmatch(stored)
            if match and match[2] in layer_names:
                stored_as[f"model.layers.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"] = stored
            elif stored == FEATURES:
                stored_as[stored] = stored
            elif base in _TOP_NAMES and kind in ("weight", "bias"):
                stored_as[f"{_TOP_NAMES[base]}.{kind}"] = stored
            else:
                raise ModelError(
                    f"{self.path}: tensor {stored!r} has no place in a {self.architecture} model",
                    hint="the file holds a variant of the architecture that is not supported",
                )
        return stored_as

    def _key(self, name: str, default: Any = None) -> Any:
        """A value of the architecture's own section; without a default it must be there."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ModelError(
                f"{self.path} does not say {self.architecture}.{name}",
                hint="the file was written by a very old or a foreign converter: convert the model again",
            )
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.path}: {self.architecture}.{name} differs between layers, which is not supported",
                    hint="use a model whose layers all have the same shape",
                )
            value = value[0]
        return value

    def _read_config(self) -> dict[str, Any]:
        if self._key("expert_count", 0):
            raise ModelError(
                f"{self.path} is a mixture of experts, which is not supported", hint="use a dense model"
            )
        # A draft that reads its target's hidden rows has the target's embedding, and a list of tokens.
        tokens = self._tensors.get("d2t" if FEATURES in self._tensors else "token_embd.weight")
        if tokens is None:
            raise missing_tensor("token_embd.weight", self.path)
        num_heads = int(self._key("attention.head_count"))
        hidden_size = int(self._key("embedding_length"))
        head_dim = int(self._key("attention.key_length", hidden_size // max(num_heads, 1)))
        token_id = {
            f"{name}_token_id": self.metadata.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        window = int(self._key("attention.sliding_window", 0))
        if window and self.architecture != "llama":
            raise ModelError(
                f"{self.path} does not say which layers have its sliding window of {window}",
                hint="use the model's Hugging Face directory",
            )
        return {
            "model_type": "mistral" if window else self.architecture,
            "sliding_window": window or None,
            "hidden_size": hidden_size,
            "num_hidden_layers": int(self._key("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self._key("attention.head_count_kv", num_heads)),
            "head_dim": head_dim,
            "intermediate_size": int(self._key("feed_forward_length")),
            "hidden_act": "silu",
            "rms_norm_eps": _shortest(self._key("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(head_dim),
            "max_position_embeddings": int(self._key("context_length")),
            "vocab_size": tokens.shape[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": any(".attn_q.bias" in name for name in self._tensors),
            "mlp_bias": any(".ffn_up.bias" in name for name in self._tensors),
            **token_id,
        }

    def _rope(self, head_dim: int) -> dict[str, Any]:
        if self._key("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(
                f"{self.path} rotates only part of each head, which is not supported",
                hint="use another model",
            )
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": _shortest(self._key("rope.freq_base", 10000.0)),
        }
        old_factor = self._key("rope.scale_linear", 1.0)
        factor = self._key("rope.scaling.factor", old_factor)
        scaling = self._key("rope.scaling.type", "linear" if old_factor != 1.0 else "none")
        if scaling in ("linear", "yarn") and factor not in (0.0, 1.0):
            rope |= {"rope_type": scaling, "factor": _shortest(factor)}
        elif scaling not in ("linear", "none"):
            raise ModelError(
                f"{self.path} scales positions by {scaling!r}, which is not supported",
                hint="supported in GGUF: none, linear, yarn, and frequency factors (Llama 3.1)",
            )
        if scaling == "yarn":
            if other := [key for key in self.metadata if "rope.scaling.yarn_" in key]:
                raise ModelError(f"{self.path}: {other[0]} is not supported", hint="use another model")
            rope["original_max_position_embeddings"] = int(self._key("rope.scaling.original_context_length"))
        if "rope_freqs.weight" in self._tensors:
            factors = self._dequantize("rope_freqs.weight")
            if factors.shape != (head_dim // 2,):
                raise ModelError(
                    f"{self.path}: rope_freqs.weight has the wrong shape {tuple(factors.shape)}",
                    hint=_FETCH_AGAIN,
                )
            rope["freq_factors"] = factors
        return rope


def _row_bytes(tensor: _Tensor) -> int:
    """Bytes in a row of whole blocks, about 4 KiB, at which the library dequantises fastest.

    It works on 16 rows at a time, and a row of a small model is too short for that to pay.
    """
    block_bytes = int(gguf.GGML_QUANT_SIZES[tensor.quant][1])
    num_blocks = tensor.num_bytes // block_bytes
    per_row = min(num_blocks, max(1, 4096 // block_bytes))
    while num_blocks % per_row:
        per_row -= 1
    return per_row * block_bytes


def _shortest(value: float) -> float:
    """The float a person wrote before it was stored in 32 bits: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))
