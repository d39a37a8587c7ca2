"""Configurations: what is read, where it ends, and what is refused for changing the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specinfer import LLM, ConfigError, RequestError, SamplingParams
from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig
from specinfer.models.families import FAMILIES
from specinfer.models.loader import open_checkpoint
from specinfer.models.raw import RawConfig

ROTARY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
OPT = {**ROTARY, "ffn_dim": 64}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4}


def read(model_type: str, **values: Any) -> ModelConfig:
    base = {"opt": OPT, "gpt2": GPT2}.get(model_type, ROTARY)
    raw = RawConfig({"model_type": model_type, **base, **values}, "config.json")
    return FAMILIES[model_type].read_config(raw).check(raw.source)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


@pytest.mark.parametrize(
    ("model_type", "values", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None,) * 3),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(model_type: str, values: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(model_type, **values).windows == windows


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"num_attention_heads": 0}, "impossible shape"),
        ("llama", {"num_key_value_heads": 3}, "impossible shape"),
        ("llama", {"hidden_size": "32"}, "hidden_size should be int"),
        ("llama", rope(rope_type="proportional"), "rope type 'proportional'"),
        ("llama", rope(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor"),
        ("llama", rope(rope_type="linear"), "factor is missing"),
        ("llama", rope(rope_type="longrope", short_factor=[1.0] * 4), "long_factor is missing"),
        ("llama", rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "short_factor has 1"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be positive"),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3},
            "chunked_attention",
        ),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "for 3 layers"),
        ("opt", {"activation_function": "gelu"}, "activation_function 'gelu'"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function 'gelu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_refused(model_type: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        read(model_type, **values)
    assert "config.json" in str(caught.value)


def test_rope_of_before_transformers_5() -> None:
    old = read("llama", rope_theta=20000.0, rope_scaling={"type": "linear", "factor": 2.0}).rope
    new = read("llama", **rope(rope_type="linear", rope_theta=20000.0, factor=2.0)).rope
    assert old == new and read("llama", rope_theta=20000.0).rope == read("llama", **rope(rope_theta=2e4)).rope


def test_contexts(tmp_path: Path, write_family) -> None:  # noqa: ANN001
    """The config's positions are the limit. Dynamic scaling does not move it: beyond, a token's frequencies
    would depend on the longest path of a tree. Yarn's factor does."""
    yarn = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
    assert read("qwen2", **yarn).max_position == 2048
    scaling = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    path, _ = write_family(tmp_path, "llama", max_position_embeddings=64, **scaling)
    llm = LLM(str(path), dtype="float32")
    assert llm.engine.parts.max_model_len == 64
    with pytest.raises(RequestError, match="64"):
        llm.generate([1] * 60, SamplingParams(max_tokens=10))
    with pytest.raises(ConfigError, match="made for 64"):
        LLM(str(path), max_model_len=65)


@pytest.mark.parametrize(
    ("model_type", "prefix"), [("llama", "model."), ("opt", "model."), ("gpt2", "transformer.")]
)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_checkpoints_of_the_bare_model(
    model_type: str,
    prefix: str,
    kind: str,
    tmp_path: Path,
    write_family,  # noqa: ANN001
    make_runner,  # noqa: ANN001
    assert_equal_logits,  # noqa: ANN001
) -> None:
    """Without the prefix of the whole model's names, pickled, and in fp16."""
    path, theirs = write_family(tmp_path, model_type)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.half().float()
    state = {name.removeprefix(prefix): t.half().contiguous() for name, t in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        del state["lm_head.weight"]
    (path / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(state, path / "pytorch_model.bin")
    else:
        save_file(state, path / "model.safetensors")
    for native in (False, True):
        assert_equal_logits(make_runner(path, native=native), theirs)


def test_more_layers_than_the_config_has(tmp_path: Path, write_family) -> None:  # noqa: ANN001
    path, _ = write_family(tmp_path, "gpt2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_layer": 1}))
    with pytest.raises(ModelError, match="1 layers, the weights have more"):
        open_checkpoint(path)


def test_a_head_of_its_own_where_the_config_ties(
    tmp_path: Path,
    write_family,  # noqa: ANN001
    make_runner,  # noqa: ANN001
    assert_equal_logits,  # noqa: ANN001
) -> None:
    """As in transformers: a head that was trained apart counts, whatever became of the config."""
    path, theirs = write_family(tmp_path, "qwen2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert_equal_logits(make_runner(path), theirs)
    assert_equal_logits(make_runner(path, native=True), theirs)
