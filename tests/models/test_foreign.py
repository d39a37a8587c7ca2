"""Decoders that run by transformers' own code over our attention, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.gemma.modeling_gemma import GemmaMLP

from specinfer.attention import Span
from specinfer.errors import ModelError
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, WorkItem

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "granite": ("granite", {"attention_multiplier": 0.1}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 33}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi": ("bloom", {"n_head": 4, "n_layer": 2}, "registry"),
    "state space": ("mamba", {}, "registry"),
    "chunks": ("llama4_text", {}, "chunked_attention"),
    "latent": ("deepseek_v2", {"kv_lora_rank": 16, "v_head_dim": 8, "first_k_dense_replace": 2}, "keys"),
    "softcapping": ("gemma2", {"layer_types": ["full_attention"] * 2}, "'softcap'"),
    "sinks": ("gpt_oss", {"layer_types": ["full_attention"] * 2, "num_local_experts": 4}, "'s_aux'"),
    "own mask": ("doge", {}, "mask of its own"),
    "attends twice": ("diffllama", {}, r"\[0, 0, 1, 1\]"),
    "both ways": ("bert", {"num_key_value_heads": 4}, "differ from its own"),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str,
    tmp_path: Path,
    write_family,  # noqa: ANN001
    make_runner,  # noqa: ANN001
    assert_equal_logits,  # noqa: ANN001
) -> None:
    model_type, changes = CASES[case]
    path, theirs = write_family(tmp_path, model_type, **changes)
    assert open_checkpoint(path).is_foreign
    assert_equal_logits(make_runner(path), theirs)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused(
    case: str,
    tmp_path: Path,
    write_family,  # noqa: ANN001
    make_runner,  # noqa: ANN001
    capfd: pytest.CaptureFixture[str],
) -> None:
    model_type, changes, reason = REFUSED[case]
    path, _ = write_family(tmp_path, model_type, **changes)
    capfd.readouterr()
    with pytest.raises(ModelError, match=f"{model_type}.*{reason}") as caught:
        make_runner(path)
    assert caught.value.hint
    assert capfd.readouterr().err == ""


def test_a_model_of_no_known_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "klingon"}')
    with pytest.raises(ModelError, match="'klingon' is not supported: transformers cannot read it"):
        open_checkpoint(tmp_path)


def test_longrope_keeps_to_the_original_context(tmp_path: Path, write_family) -> None:  # noqa: ANN001
    """Beyond it, its frequencies would depend on what else is in the batch."""
    path, _ = write_family(tmp_path, "phi3", **CASES["phi3-longrope"][1])
    assert open_checkpoint(path).config.max_position == 256


def test_a_layer_that_mixes_tokens_by_other_means(
    tmp_path: Path,
    write_family,  # noqa: ANN001
    make_runner,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in its config or its calls shows it: the check at load does."""
    path, _ = write_family(tmp_path, "gemma")
    forward = GemmaMLP.forward
    monkeypatch.setattr(GemmaMLP, "forward", lambda self, x: forward(self, x + 0.1 * x.roll(1, 1)))
    with pytest.raises(ModelError, match="differ from its own"):
        make_runner(path)


def test_missing_weights(tmp_path: Path, write_family, make_runner) -> None:  # noqa: ANN001
    path, model = write_family(tmp_path, "phi3")
    state = {name: t.contiguous() for name, t in model.state_dict().items() if "layers.1.mlp" not in name}
    save_file(state, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp"):
        make_runner(path)


def test_it_runs_whole_forwards_only(tmp_path: Path, write_family, make_runner) -> None:  # noqa: ANN001
    runner = make_runner(write_family(tmp_path, "gemma")[0])
    span = Span(np.arange(0), np.arange(3), np.arange(-1, 2))
    batch = Batch.of([WorkItem(span, np.arange(3), np.arange(0))])
    assert runner.run(batch)[0].shape == (0, 300)
    with pytest.raises(ModelError, match="hidden rows"):
        runner.run(batch, capture_layers=[0])
    with pytest.raises(ModelError, match="ranges"):
        runner.run_layers(batch, torch.zeros(3, 32), range(1))
