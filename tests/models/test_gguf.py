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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specinfer.attention import Span
from specinfer.errors import ModelError
from specinfer.models.gguf import GGUFFile
from specinfer.models.gguf_header import Strings
from specinfer.runtime import Batch, WorkItem

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, VOCAB = 64, 4, 2, 2, 96, 40
QUANTS = gguf.GGMLQuantizationType
Edit = Callable[[gguf.GGUFWriter], None]


def tiny(arch: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model of a GGUF architecture."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": FEED_FORWARD,
        "tie_word_embeddings": False,
        **changes,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **settings)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "_norm.weight")):  # zeros and ones when made
            torch.nn.init.normal_(parameter)
    return model


def permute(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write(
    path: Path,
    model: PreTrainedModel,
    quant: QUANTS = QUANTS.F32,
    edit: Edit = lambda _: None,
    arch: str | None = None,
) -> Path:
    """What llama.cpp's converter writes. arch: of the file, where it is not the model's type."""
    config = model.config
    arch = arch or config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_array("test.strings", ["one", "two", "drei"])
    edit(writer)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        known.get(config.model_type, gguf.MODEL_ARCH.LLAMA), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if ".q_proj." in name and arch == "llama":
            values = permute(values, config.num_attention_heads)
        if ".k_proj." in name and arch == "llama":
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
    model = tiny(attention_bias=biases, mlp_bias=biases)
    file = GGUFFile(write(tmp_path / "tiny.gguf", model, quant))
    originals = model.state_dict()
    assert set(file.names()) == set(originals)
    for name, original in originals.items():
        read = file.get(name)
        assert read.dtype == torch.float32 and read.is_contiguous()
        torch.testing.assert_close(read, original, rtol=0.0, atol=tolerance)
    assert file.config()["attention_bias"] is biases
    assert file.config()["mlp_bias"] is biases


def is_dequantised(kind: QUANTS) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return kind not in (QUANTS.F32, QUANTS.F16)


@pytest.mark.parametrize(
    "kind", [kind for kind in QUANTS if is_dequantised(kind)], ids=lambda kind: kind.name
)
def test_every_block_is_the_library_s(tmp_path: Path, kind: QUANTS) -> None:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, blocks = 36, 3
    raw = np.random.default_rng(0).integers(0, 60, (num_rows, blocks * block_bytes), dtype=np.uint8)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output_norm.bias", raw, raw_dtype=kind)

    file = GGUFFile(write(tmp_path / "blocks.gguf", tiny(), edit=edit))
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    assert expected.shape == (num_rows, blocks * block_len)
    assert torch.equal(file.get("model.norm.bias"), expected)


ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Edit]] = {
    "llama": ("llama", {}, lambda _: None),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, lambda _: None),
    "mistral": ("mistral", {"sliding_window": 33}, lambda w: w.add_sliding_window(33)),
    "qwen2": ("qwen2", {}, lambda _: None),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, lambda _: None),
    "qwen3": ("qwen3", {"head_dim": 32}, lambda _: None),
}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_logits_equal_transformers(case: str, tmp_path: Path, make_runner, assert_equal_logits) -> None:  # noqa: ANN001
    model_type, changes, edit = ARCHITECTURES[case]
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    model = tiny(model_type, vocab_size=300, rope_parameters=rope, rms_norm_eps=1e-5, **changes)
    arch = "llama" if model_type == "mistral" else model_type
    assert_equal_logits(make_runner(write(tmp_path / "tiny.gguf", model, edit=edit, arch=arch)), model)


@pytest.mark.parametrize("case", ["mistral", "qwen2-tied", "qwen3"])
def test_blocks_are_multiplied_as_stored(case: str, tmp_path: Path, make_runner) -> None:  # noqa: ANN001
    """Rows alone are rounded more than on the torch path."""
    model_type, changes, edit = ARCHITECTURES[case]
    arch = "llama" if model_type == "mistral" else model_type
    path = write(tmp_path / "tiny.gguf", tiny(model_type, **changes), QUANTS.Q8_0, edit, arch)
    span = Span(np.zeros(0, np.int64), np.arange(60), np.arange(-1, 59))
    batch = Batch.of([WorkItem(span, np.random.default_rng(0).integers(0, VOCAB, 60), np.arange(60))])
    ours, theirs = make_runner(path, native=True), make_runner(path)
    assert ours.model.weight_types == ("q8_0",)
    expected = theirs.run(batch)[0]
    assert (ours.run(batch)[0] - expected).abs().mean() < 0.03 * expected.abs().mean()


def test_config(tmp_path: Path) -> None:
    config = GGUFFile(write(tmp_path / "tiny.gguf", tiny())).config()
    assert config == {
        "model_type": "llama",
        "sliding_window": None,
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
    file = GGUFFile(write(tmp_path / "tiny.gguf", tiny(tie_word_embeddings=True)))
    assert file.config()["tie_word_embeddings"] is True
    assert "lm_head.weight" not in file.names()
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        file.get("lm_head.weight")


def test_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = GGUFFile(write(tmp_path / "linear.gguf", tiny(), edit=linear)).config()["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}

    factors = np.linspace(1.0, 8.0, HIDDEN // HEADS // 2, dtype=np.float32)
    edit: Edit = lambda writer: writer.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    file = GGUFFile(write(tmp_path / "factors.gguf", tiny(), edit=edit))
    assert torch.equal(file.config()["rope_parameters"]["freq_factors"], torch.from_numpy(factors))
    assert not any("rope" in name for name in file.names())

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = GGUFFile(write(tmp_path / "yarn.gguf", tiny(), edit=yarn)).config()["rope_parameters"]
    assert rope == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }

    def more(writer: gguf.GGUFWriter) -> None:
        yarn(writer)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    with pytest.raises(ModelError, match="yarn_beta_fast"):
        GGUFFile(write(tmp_path / "more.gguf", tiny(), edit=more))

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    with pytest.raises(ModelError, match="longrope"):
        GGUFFile(write(tmp_path / "longrope.gguf", tiny(), edit=longrope))


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

    path = write(tmp_path / "tiny.gguf", tiny(), edit=edit)
    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    found = GGUFFile(path).metadata.items()
    assert {key: list(v) if isinstance(v, Strings) else v for key, v in found} == expected


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny(num_hidden_layers=1)).read_bytes()


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


def test_more_strings_than_the_file_has_room_for(tmp_path: Path) -> None:
    """Refused by their number: a place for each would take several times the file's bytes."""
    key, array, string = struct.pack("<Q", 1) + b"a", 9, 8
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", array, string, 500)
    path = tmp_path / "strings.gguf"
    path.write_bytes(header + bytes(3999))
    with pytest.raises(ModelError, match="an array claims 500 entries"):
        GGUFFile(path)


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
    path = write(tmp_path / "other.gguf", tiny(), arch="mamba")
    with pytest.raises(ModelError, match="mamba") as caught:
        GGUFFile(path)
    assert caught.value.hint == "supported in GGUF: llama, qwen2, qwen3"


def test_unsupported_type(tmp_path: Path) -> None:
    edit: Edit = lambda writer: writer.add_tensor("output_norm.bias", np.zeros(4, np.int32))  # noqa: E731
    with pytest.raises(ModelError, match=r"output_norm\.bias.*I32"):
        GGUFFile(write(tmp_path / "ints.gguf", tiny(), edit=edit))


def test_unknown_tensor_and_variants(tmp_path: Path) -> None:
    zeros = np.zeros(4, np.float32)
    edit: Edit = lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", zeros)  # noqa: E731
    with pytest.raises(ModelError, match="attn_q_norm"):
        GGUFFile(write(tmp_path / "norms.gguf", tiny(), edit=edit))
    window: Edit = lambda writer: writer.add_sliding_window(8)  # noqa: E731
    with pytest.raises(ModelError, match="sliding window of 8"):
        GGUFFile(write(tmp_path / "window.gguf", tiny("qwen2"), edit=window))
    with pytest.raises(ModelError, match="mixture of experts"):
        GGUFFile(write(tmp_path / "moe.gguf", tiny(), edit=lambda writer: writer.add_expert_count(8)))
    with pytest.raises(ModelError, match="part of each head"):
        GGUFFile(write(tmp_path / "rot.gguf", tiny(), edit=lambda w: w.add_rope_dimension_count(8)))


def test_the_real_model(smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    config = file.config()
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["tie_word_embeddings"] is True
    assert len(file.names()) == 30 * 9 + 2
    assert file.get("model.layers.29.mlp.down_proj.weight").shape == (576, 1536)
