"""Decoders that run by transformers' own code over our attention, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer.models.loader import open_checkpoint

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"]}),
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
    "softcapping": ("gemma2", {"layer_types": ["full_attention"] * 2}, "'softcap'"),
    "sinks": ("gpt_oss", {"layer_types": ["full_attention"] * 2, "num_local_experts": 2}, "'s_aux'"),
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
