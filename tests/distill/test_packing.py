"""A draft as one file: the same model, rounded to 8 bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from specinfer import LLM, ConfigError, ModelError, SamplingParams
from specinfer.distill.packing import pack
from specinfer.models.loader import open_checkpoint


def test_a_packed_draft_is_the_draft(tiny_model: Path, other_draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    pack(other_draft, file)
    draft, packed = open_checkpoint(other_draft), open_checkpoint(file)
    assert packed.config == draft.config and packed.embeds_draft_vocab
    np.testing.assert_array_equal(packed.draft_vocab, draft.draft_vocab)
    assert set(packed.weights.names()) == set(draft.weights.names())
    for name in draft.weights.names():
        values = draft.weights.get(name).float()
        torch.testing.assert_close(packed.weights.get(name), values, rtol=0, atol=values.abs().max() / 250)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24)
    plain, drafted = (
        LLM(str(tiny_model), drafts=drafts, tree="2,1").generate(["abc"], params)[0].outputs[0]
        for drafts in ([], [str(file)])
    )
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_draft_tokens > 0
    alone = LLM(str(file)).generate([[1, 2, 3]], params)[0].outputs[0]  # it has no tokenizer
    assert len(alone.token_ids) == 24 and alone.text == ""


def test_what_is_no_draft_of_ours(tmp_path: Path, write_model: object) -> None:
    model = write_model(tmp_path / "other", model_type="mistral")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="positions that are not packed"):
        pack(model, tmp_path / "draft.gguf")


def test_a_damaged_vocabulary(other_draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    pack(other_draft, file)
    data = bytearray(file.read_bytes())
    at = data.index(b"d2t") + 3 + 4 + 8  # behind the name, the number of dimensions and the dimension
    assert data[at] == gguf.GGMLQuantizationType.I32
    file.write_bytes(data[:at] + bytes([gguf.GGMLQuantizationType.F32]) + data[at + 1 :])
    with pytest.raises(ModelError, match="d2t is of type F32"):
        open_checkpoint(file)
