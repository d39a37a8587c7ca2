"""GGUF: config, dequantised and unpermuted weights against the originals, and broken files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specinfer.errors import ModelError
from specinfer.models.gguf import GGUFFile

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, VOCAB = 64, 4, 2, 2, 96, 40
QUANTS = gguf.GGMLQuantizationType
Edit = Callable[[gguf.GGUFWriter], None]


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FEED_FORWARD,
        "tie_word_embeddings": False,
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero when made
            torch.nn.init.normal_(parameter)
    return model


def permute(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write(
    path: Path,
    model: LlamaForCausalLM,
    quant: QUANTS = QUANTS.F32,
    edit: Edit = lambda _: None,
    arch: str = "llama",
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_array("test.strings", ["one", "two", "drei"])
    edit(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored
        kind = quant if values.ndim == 2 else QUANTS.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("quant", "tolerance"),
    [(QUANTS.F32, 0.0), (QUANTS.F16, 1e-4), (QUANTS.BF16, 1e-3), (QUANTS.Q8_0, 1e-3)]
    + [(QUANTS.Q5_0, 1e-2), (QUANTS.Q4_1, 2e-2), (QUANTS.Q4_0, 2e-2)],
)
@pytest.mark.parametrize("biases", [False, True])
def test_weights_equal_the_originals(tmp_path: Path, quant: QUANTS, tolerance: float, biases: bool) -> None:
    model = tiny_llama(attention_bias=biases, mlp_bias=biases)
    file = GGUFFile(write(tmp_path / "tiny.gguf", model, quant))
    originals = model.state_dict()
    assert set(file.names()) == set(originals)
    for name, original in originals.items():
        read = file.get(name)
        assert read.dtype == torch.float32 and read.is_contiguous()
        torch.testing.assert_close(read, original, rtol=0.0, atol=tolerance)
    assert file.config()["attention_bias"] is biases
    assert file.config()["mlp_bias"] is biases


@pytest.mark.parametrize(
    "quant", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ2_XXS", "TQ1_0"]
)
def test_every_block_is_the_library_s(tmp_path: Path, quant: str) -> None:
    kind = QUANTS[quant]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, blocks = 36, 3
    raw = np.random.default_rng(0).integers(0, 60, (num_rows, blocks * block_bytes), dtype=np.uint8)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output_norm.bias", raw, raw_dtype=kind)

    file = GGUFFile(write(tmp_path / "blocks.gguf", tiny_llama(), edit=edit))
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    assert expected.shape == (num_rows, blocks * block_len)
    assert torch.equal(file.get("model.norm.bias"), expected)


def test_config_and_weights_make_the_same_model(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 50000.0}, rms_norm_eps=1e-5)
    file = GGUFFile(write(tmp_path / "tiny.gguf", model))
    again = LlamaForCausalLM(LlamaConfig(**file.config())).eval()
    again.load_state_dict({name: file.get(name) for name in file.names()})
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_config(tmp_path: Path) -> None:
    config = GGUFFile(write(tmp_path / "tiny.gguf", tiny_llama())).config()
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": FEED_FORWARD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_tied_embeddings(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "tiny.gguf", tiny_llama(tie_word_embeddings=True)))
    assert file.config()["tie_word_embeddings"] is True
    assert "lm_head.weight" not in file.names()
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        file.get("lm_head.weight")


def test_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = GGUFFile(write(tmp_path / "linear.gguf", tiny_llama(), edit=linear)).config()["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}

    factors = np.linspace(1.0, 8.0, HIDDEN // HEADS // 2, dtype=np.float32)
    edit: Edit = lambda writer: writer.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    file = GGUFFile(write(tmp_path / "factors.gguf", tiny_llama(), edit=edit))
    assert torch.equal(file.config()["rope_parameters"]["freq_factors"], torch.from_numpy(factors))
    assert not any("rope" in name for name in file.names())

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    with pytest.raises(ModelError, match="yarn"):
        GGUFFile(write(tmp_path / "yarn.gguf", tiny_llama(), edit=yarn))


def test_metadata_equals_the_library_s_reader(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_array("test.floats", [0.5, -1.5])
        writer.add_array("test.empty", [1])
        writer.add_bool("test.bool", True)
        writer.add_int8("test.int8", -3)
        writer.add_uint64("test.uint64", 1 << 40)
        writer.add_float64("test.float64", 0.1)
        writer.add_string("test.string", "naïve 🙂")
        writer.add_custom_alignment(128)

    path = write(tmp_path / "tiny.gguf", tiny_llama(), edit=edit)
    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert GGUFFile(path).metadata == expected


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama(num_hidden_layers=1)).read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file(tmp_path: Path, whole: bytes, share: float) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: 4 + int(share * (len(whole) - 40))])
    with pytest.raises(ModelError, match=r"cut\.gguf.*not a whole GGUF") as caught:
        GGUFFile(path)
    assert caught.value.hint


def test_every_cut_of_the_header_is_an_error(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(0, 1200, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GGUFFile(path)


def test_a_corrupt_header_is_never_a_traceback(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "corrupt.gguf"
    for position in range(8, 1200, 11):
        path.write_bytes(whole[:position] + b"\xff" * 8 + whole[position + 8 :])
        try:
            GGUFFile(path)
        except ModelError as error:
            assert error.hint


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<html>" * 10)
    with pytest.raises(ModelError, match=r"page\.gguf is not a GGUF"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(40))
    with pytest.raises(ModelError, match="version 1"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(40))
    with pytest.raises(ModelError, match="big-endian"):
        GGUFFile(path)
    with pytest.raises(ModelError, match="no file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot read"):
        GGUFFile(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "other.gguf", tiny_llama(), arch="mamba")
    with pytest.raises(ModelError, match="mamba") as caught:
        GGUFFile(path)
    assert caught.value.hint == "supported in GGUF: llama"


def test_unsupported_type(tmp_path: Path) -> None:
    edit: Edit = lambda writer: writer.add_tensor("output_norm.bias", np.zeros(4, np.int32))  # noqa: E731
    with pytest.raises(ModelError, match=r"output_norm\.bias.*I32"):
        GGUFFile(write(tmp_path / "ints.gguf", tiny_llama(), edit=edit))


def test_unknown_tensor_and_variants(tmp_path: Path) -> None:
    zeros = np.zeros(4, np.float32)
    edit: Edit = lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", zeros)  # noqa: E731
    with pytest.raises(ModelError, match="attn_q_norm"):
        GGUFFile(write(tmp_path / "norms.gguf", tiny_llama(), edit=edit))
    with pytest.raises(ModelError, match="mixture of experts"):
        GGUFFile(write(tmp_path / "moe.gguf", tiny_llama(), edit=lambda writer: writer.add_expert_count(8)))
    with pytest.raises(ModelError, match="part of each head"):
        GGUFFile(write(tmp_path / "rot.gguf", tiny_llama(), edit=lambda w: w.add_rope_dimension_count(8)))


def test_the_real_model(smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    config = file.config()
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["tie_word_embeddings"] is True
    assert len(file.names()) == 30 * 9 + 2
    assert file.get("model.layers.29.mlp.down_proj.weight").shape == (576, 1536)
