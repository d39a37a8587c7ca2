"""Whole engines over every family: the same tokens with speculation and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer import LLM, SamplingParams
from specinfer.engine import verifying
from specinfer.models.families import SUPPORTED_MODEL_TYPES

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in SUPPORTED_MODEL_TYPES},
    "mistral": ("mistral", {"sliding_window": 9}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    # By transformers' own code, which promises equality up to near-ties: none in fp32 here.
    "gemma": ("gemma", {}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"sliding_window": 9}),
}
IN_BF16 = ("gpt2", "opt-350m", "qwen3", "qwen2-window")
PROMPTS = [np.random.default_rng(i).integers(0, 256, 5 + 7 * i).tolist() for i in range(4)]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, "float32") for case in CASES] + [(case, "bfloat16") for case in IN_BF16]
)
def test_speculation_changes_nothing(case: str, dtype: Any, tmp_path: Path, write_family) -> None:  # noqa: ANN001
    model_type, changes = CASES[case]
    path = str(write_family(tmp_path / "target", model_type, **changes)[0])
    # One layer fewer: right now and then.
    draft = str(write_family(tmp_path / "draft", model_type, **{**changes, "num_hidden_layers": 1})[0])
    plain = LLM(path, dtype=dtype, max_num_seqs=1).generate(PROMPTS, PARAMS, progress=False)
    llm = LLM(path, drafts=[path, draft], tree="3,2,1,1", dtype=dtype, max_num_seqs=4)
    speculative = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [o.outputs[0].token_ids for o in speculative] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.outputs[0].stats.num_accepted_tokens for o in speculative) > 20
    assert not any(o.outputs[0].stats.num_near_ties for o in speculative)
    llm.engine.check_integrity()


@pytest.mark.parametrize(("family", "num"), [("gemma", 20), ("llama", 0)])
def test_near_ties_are_counted_where_rows_do_not_keep_their_bits(
    family: str,
    num: int,
    tmp_path: Path,
    write_family,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With any lead taken for a near-tie, every token is one."""
    monkeypatch.setitem(verifying.ROUNDING, torch.float32, float("inf"))
    path = str(write_family(tmp_path, family)[0])
    outputs = LLM(path, drafts=["ngram"], dtype="float32").generate(PROMPTS, PARAMS, progress=False)
    assert [o.outputs[0].stats.num_near_ties for o in outputs] == [num] * len(PROMPTS)
