"""Drafts that read the target's last hidden rows: what they read, make of it and keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm

from specinfer import LLM, ConfigError
from specinfer.distill import feature_student
from specinfer.distill.answers import Answer
from specinfer.distill.batches import MicroBatch, micro_batch
from specinfer.distill.feature_student import FeatureStudent
from specinfer.distill.features import open_features, root_mean_square
from specinfer.distill.forcing import hidden_rows
from specinfer.distill.hits import draft_ranks
from specinfer.distill.inheritance import sample_rows
from specinfer.distill.lessons import make_lessons
from specinfer.distill.packing import pack
from specinfer.distill.shape import shape_of
from specinfer.distill.student import Student
from specinfer.distill.token_student import TokenStudent
from specinfer.distill.trainer import Trainer, TrainSettings
from specinfer.models.loader import open_checkpoint

VOCAB = np.arange(20, 300)
Ids = np.ndarray | None


@pytest.fixture(scope="module")
def lessons(tiny_model, tmp_path_factory):
    """Of two prompts with two answers each, one short."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, n).tolist() for n in (9, 9, 20, 20)]
    prompts[1] = prompts[0]
    answers = [
        Answer(i, "k", 0.0, prompt, rng.integers(0, 300, n).tolist())
        for i, (prompt, n) in enumerate(zip(prompts, (6, 1, 12, 5), strict=True))
    ]
    llm = LLM(str(tiny_model), device="cpu", dtype="float32")
    return make_lessons(llm, answers, tmp_path_factory.mktemp("lessons"), layer=1, quiet=True)


def batch_of(student, lessons):
    weights = [np.ones(lesson.text.num_rows, np.float32) for lesson in lessons]
    return micro_batch(lessons, weights, student.draft_ids, student.fed_ids)


def test_features_are_the_rows_that_the_last_layer_leaves(tiny_model, lessons):
    llm = LLM(str(tiny_model), device="cpu", dtype="float32")
    for lesson in lessons:
        rows = hidden_rows(llm, lesson.text, range(1, 2))[1][:-1]
        assert torch.equal(torch.from_numpy(lesson.features.read()), rows.half())
    squares = np.concatenate([lesson.features.read()[1:] for lesson in lessons]).astype(float) ** 2
    assert root_mean_square(lesson.features for lesson in lessons) == pytest.approx(squares.mean() ** 0.5)


def reference(directory: Path, target: Path, vocab: Ids, batch: MicroBatch) -> torch.Tensor:
    """The logits after a batch's rows of a draft on the disk, by transformers' own layer."""
    from transformers import LlamaConfig, LlamaModel

    weights, target_weights = (
        load_file(directory / "model.safetensors"),
        load_file(target / "model.safetensors"),
    )
    embedding = target_weights["model.embed_tokens.weight"]
    model = LlamaModel(LlamaConfig.from_pretrained(directory)).float()
    own = {name.removeprefix("model."): x for name, x in weights.items() if name != "features.weight"}
    model.load_state_dict({**own, "embed_tokens.weight": model.embed_tokens.weight})
    read = [rms_norm(x, x.shape[-1:], eps=1e-6) for x in (embedding[batch.token_ids], batch.features.float())]
    inputs = linear(torch.cat(read, -1), weights["features.weight"].float())
    hidden = model(inputs_embeds=inputs).last_hidden_state
    head = target_weights.get("lm_head.weight", embedding)
    if vocab is not None:
        head = head[torch.from_numpy(vocab)]
    return linear(hidden.flatten(0, 1)[batch.rows], head)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("vocab", "num_layers", "changes"),
    [
        (VOCAB, 1, {}),
        (None, 2, {"tie_word_embeddings": True}),
        (
            VOCAB,
            1,
            {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3, "pad_token_id": 290},
        ),
    ],
)
def test_a_student_on_the_disk_is_what_it_was(write_model, tmp_path, lessons, vocab, num_layers, changes):
    path = write_model(tmp_path / "target", **changes)
    target = open_checkpoint(path)
    made = FeatureStudent.fresh(vocab, target, 3.0, seed=0, num_layers=num_layers)
    made.save(tmp_path / "draft")
    assert set(load_file(tmp_path / "draft" / "model.safetensors")) == {
        "features.weight",
        "model.norm.weight",
        *(
            name
            for i in range(num_layers)
            for name in target.weights.names()
            if name.startswith(f"model.layers.{i}.")
        ),
    }
    draft = open_checkpoint(tmp_path / "draft")
    assert (draft.config.rope, draft.config.norm_eps) == (target.config.rope, target.config.norm_eps)
    batch = batch_of(made, lessons)
    expected = reference(tmp_path / "draft", path, vocab, batch)
    stored = FeatureStudent.further(draft, target, 2.0)
    torch.testing.assert_close(stored.logits(batch), expected, rtol=0, atol=1e-4 * expected.std().item())
    assert (made.logits(batch) - expected).std() < 0.05 * expected.std()  # bf16 on the disk


def test_a_fresh_student_is_the_last_layer_reading_its_own_rows(tiny_model, lessons, monkeypatch):
    monkeypatch.setattr(feature_student, "NOISE_SHARE", 0.0)
    target = open_checkpoint(tiny_model)
    student = FeatureStudent.fresh(None, target, 3.0, seed=0)
    batch = batch_of(student, lessons)
    weights = {n: student.model.state_dict()[n] for n in ("norm.weight", "model.layers.0.mlp.up_proj.weight")}
    assert torch.equal(weights["norm.weight"], target.weights.get("model.norm.weight"))
    last = target.weights.get("model.layers.1.mlp.up_proj.weight")
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], last)
    two = FeatureStudent.fresh(None, target, 3.0, seed=0, num_layers=2).model.state_dict()
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        assert torch.equal(two[name], target.weights.get(name))
    read = batch.features.float()
    inputs = 3.0 * read / read.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    expected = student.model.model(inputs_embeds=inputs).last_hidden_state
    torch.testing.assert_close(student.model.rows(batch.token_ids, batch.features), expected)


def test_in_training_it_reads_its_own_rows_now_and_then(tiny_model, lessons, monkeypatch):
    student = FeatureStudent.fresh(VOCAB, open_checkpoint(tiny_model), 3.0, seed=0)
    batch = batch_of(student, lessons)
    own = student.model.rows(batch.token_ids, batch.features).detach()
    own = torch.cat([torch.zeros_like(own[:, :1]), own[:, :-1]], dim=1)
    with torch.no_grad():
        mixed = [student.as_drafting(batch, np.random.default_rng(seed)).features for seed in (1, 1, 2)]
    assert torch.equal(mixed[0], mixed[1])
    assert not torch.equal(mixed[0], mixed[2])
    is_own, is_targets = (mixed[0] == own).all(-1), (mixed[0] == batch.features).all(-1)
    assert (is_own | is_targets).all()
    assert 0.1 < is_own[:, 1:].float().mean() < 0.6
    assert own[:, 1:].std() > 0 and not (is_own & is_targets)[:, 1:].all()


def test_the_engine_says_what_the_student_says(tiny_model, tmp_path, lessons):
    student = FeatureStudent.fresh(VOCAB, open_checkpoint(tiny_model), 3.0, seed=0)
    student.save(tmp_path / "draft")
    said = student.logits(batch_of(student, lessons)).argmax(dim=1).numpy()
    ends = np.cumsum([lesson.text.num_rows for lesson in lessons])
    texts, wanted = [lesson.text for lesson in lessons], np.split(VOCAB[said], ends[:-1])
    ranks = np.concatenate(draft_ranks(str(tiny_model), tmp_path / "draft", texts, wanted, 300, "cpu"))
    assert (ranks == 0).mean() > 0.8  # bf16 on the disk, 8 bits in memory
    assert ranks.max() < 4


@pytest.mark.parametrize("reads_features", [True, False])
def test_in_training_it_ranks_as_the_draft_it_becomes(tiny_model, tmp_path, lessons, reads_features):
    target = open_checkpoint(tiny_model)
    if reads_features:
        student: Student = FeatureStudent.fresh(VOCAB, target, 3.0, seed=0)
    else:
        rows = sample_rows(LLM(str(tiny_model), device="cpu"), target, [lesson.text for lesson in lessons], 2)
        student = TokenStudent.fresh(shape_of(20_000, len(VOCAB), 16), VOCAB, target, rows, seed=0)
    student.save(tmp_path / "draft")
    settings = TrainSettings(num_epochs=1, learning_rate=0.1, batch_tokens=64, seed=0)
    ones = [np.ones(lesson.text.num_rows, np.float32) for lesson in lessons]
    path, device = tmp_path / "training.pt", torch.device("cpu")
    found = Trainer(student, lessons, lessons, ones, settings, path, device).ranks(lessons, quiet=True)
    texts, wanted = [lesson.text for lesson in lessons], [lesson.top_ids[:, 0] for lesson in lessons]
    expected = draft_ranks(str(tiny_model), tmp_path / "draft", texts, wanted, 300, "cpu")
    assert [len(row) for row in found] == [len(row) for row in expected]
    difference = np.concatenate(found).astype(int) - np.concatenate(expected)
    assert abs(difference).mean() < 3  # of 280 places; bf16 on the disk
    assert np.concatenate(expected).std() > 20


def test_packed_with_all_tokens_it_lists_them(tiny_model, tmp_path):
    FeatureStudent.fresh(None, open_checkpoint(tiny_model), 3.0, seed=0).save(tmp_path / "draft")
    pack(tmp_path / "draft", tmp_path / "draft.gguf")
    packed = open_checkpoint(tmp_path / "draft.gguf")
    assert packed.reads_features
    assert packed.draft_vocab.tolist() == list(range(300))


def test_other_targets_are_refused(write_model, tmp_path):
    path = write_model(tmp_path / "target", model_type="mistral")
    with pytest.raises(ConfigError, match="of type mistral: feature drafts are trained for a llama"):
        FeatureStudent.fresh(VOCAB, open_checkpoint(path), 3.0, seed=0)


def test_a_damaged_file_is_named(tmp_path, lessons):
    path = tmp_path / "features-00000.safetensors"
    for content in (b"nothing", None):
        path.write_bytes(content) if content else save_file({"features": torch.zeros(3, 2)}, path)
        with pytest.raises(ConfigError, match=r"features-00000.safetensors is damaged"):
            open_features(path, [3, 4])
