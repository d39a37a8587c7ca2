from __future__ import annotations

from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specinfer import LLM, ConfigError
from specinfer.distill.batches import (
    MICRO_TOKENS,
    MicroBatch,
    micro_batch,
    micro_batches,
    steps,
    text_lengths,
)
from specinfer.distill.boost import FOUND_WEIGHT, boost_weights, compare
from specinfer.distill.curve import curve
from specinfer.distill.forcing import Text, forced_logits
from specinfer.distill.hits import DEPTHS, MISS, WIDTHS, coverage, draft_ranks, places, union
from specinfer.distill.inheritance import principal_axes, sample_rows
from specinfer.distill.lessons import Lesson
from specinfer.distill.loss import top_k_loss
from specinfer.distill.schedule import LAST_SHARE, learning_rate
from specinfer.distill.shape import MIN_LAYERS, SLACK, Shape, parse_size, shape_of
from specinfer.distill.token_student import TokenStudent
from specinfer.distill.vocabulary import draft_ids
from specinfer.models.loader import open_checkpoint


class Numbered(NamedTuple):
    """Features that say which token they are of: 1 of the first."""

    num_tokens: int

    def read(self):
        return np.arange(1, self.num_tokens, dtype=np.float16)[:, None]


def lesson(num_prompt, num_answer, seed=0, k=4, vocab=50):
    rng = np.random.default_rng(seed)
    top_ids = np.array([rng.permutation(vocab)[:k] for _ in range(num_answer)], np.int32)
    logprobs = np.log(rng.dirichlet(np.ones(k + 1), num_answer)[:, :k]).astype(np.float16)
    text = Text(rng.integers(0, vocab, num_prompt + num_answer), num_prompt)
    return Lesson("k", 0.0, text, top_ids, logprobs, Numbered(len(text.tokens)))


def test_the_rate_goes_up_and_down():
    rates = [learning_rate(step, 200, 1e-3) for step in range(200)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == rates[9] == pytest.approx(1e-3)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(LAST_SHARE * 1e-3)
    assert learning_rate(0, 1, 1e-3) == 1e-3


@pytest.mark.parametrize(
    ("size", "hidden", "layers"), [("5m", 192, 4), ("7m", 256, 4), ("12m", 384, 3), ("20m", 512, 4)]
)
def test_shapes(size, hidden, layers):
    shape = shape_of(parse_size(size), 16384)
    assert (shape.hidden_size, shape.num_layers) == (hidden, layers)
    assert 0.9 * parse_size(size) < shape.num_parameters <= SLACK * parse_size(size)


@given(st.integers(10**5, 10**9), st.integers(2, 10**5))
def test_a_shape_fits_its_size_or_is_refused(size, vocab):
    try:
        shape = shape_of(size, vocab)
    except ConfigError as error:
        assert "fits no head" in error.message
        assert Shape(vocab, 64, MIN_LAYERS).num_parameters > SLACK * size
        return
    assert shape.num_parameters <= SLACK * size
    assert shape.num_layers >= MIN_LAYERS
    assert shape.num_heads % shape.num_kv_heads == 0


@pytest.mark.parametrize("text", ["7", "m", "-1m", "0m", "7b", ""])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="millions"):
        parse_size(text)


def seen_rows(path, num_layers):
    """What a model's first layers read, on some text."""
    text = Text(np.random.default_rng(0).integers(0, 300, 400), 1)
    return sample_rows(LLM(str(path), device="cpu"), open_checkpoint(path), [text], num_layers)


def test_a_student_of_the_targets_shape_is_the_target(write_model, tmp_path):
    changes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 192,
    }
    path = write_model(tmp_path / "target", **changes, num_hidden_layers=3, tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"].fill_(
        1.5
    )  # others are in the embedding and the head both, which is not exact
    save_file(weights, path / "model.safetensors")
    shape = Shape(300, 64, 3, head_dim=8)
    student = TokenStudent.fresh(shape, None, open_checkpoint(path), seen_rows(path, 3), seed=0)
    [expected] = forced_logits(LLM(str(path), device="cpu", dtype="float32"), [Text(np.arange(41), 1)])
    nothing = torch.empty(0)
    found = student.logits(MicroBatch(torch.arange(40)[None], torch.arange(40), nothing, nothing, nothing))
    assert torch.allclose(found, expected, atol=1e-3 * expected.std())


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_student_is_named_by_its_seed_and_has_the_size_said(tiny_model, write_model, tmp_path, tied):
    path = write_model(tmp_path / "target", tie_word_embeddings=tied)
    shape, vocab, rows = shape_of(200_000, 280), np.arange(20, 300), seen_rows(path, 3)
    students = [TokenStudent.fresh(shape, vocab, open_checkpoint(path), rows, seed) for seed in (1, 1, 2)]
    states = [torch.cat([p.detach().flatten() for p in s.model.parameters()]) for s in students]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert students[0].num_parameters == shape.num_parameters


def test_principal_axes_keep_what_is_there():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 3, generator=generator) @ torch.randn(3, 12, generator=generator) + 5
    axes = principal_axes(rows, 4)  # rank 3, and the mean: nothing is lost
    assert torch.allclose(axes.T @ axes, torch.eye(4), atol=1e-5)
    assert torch.allclose(rows @ axes @ axes.T, rows, atol=1e-3)
    assert principal_axes(rows, 40).shape == (12, 12)


def test_the_loss_is_the_cross_entropy_of_coarse_distributions():
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    top_ids = torch.tensor([[3, 7, -1]] * 6)
    p = torch.tensor([[0.5, 0.2, 0.1]] * 6, dtype=torch.float64)
    weights = torch.arange(1.0, 7.0)
    q = logits.softmax(dim=1)
    rest = 1 - q[:, 3] - q[:, 7]
    each = -(0.5 * q[:, 3].log() + 0.2 * q[:, 7].log() + 0.3 * rest.log())
    assert float(top_k_loss(logits, top_ids, p, weights)) == pytest.approx(
        float((weights * each).sum()), rel=1e-4
    )
    # Certain of what it keeps, it stays finite.
    sure = torch.full((1, 10), -100.0).index_fill(1, torch.tensor([3]), 100.0).requires_grad_()
    top_k_loss(sure, top_ids[:1], p[:1].float(), weights[:1]).backward()
    assert torch.isfinite(sure.grad).all()


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12))
def test_every_answer_is_learnt_from_once_after_its_own_tokens(sizes):
    lessons = [lesson(a, b, seed) for seed, (a, b) in enumerate(sizes)]
    weights = [np.full(x.text.num_rows, i + 1, np.float32) for i, x in enumerate(lessons)]
    ids = draft_ids(np.arange(5, 50), 50)
    fed = np.arange(50)[::-1]
    seen = []
    for members in micro_batches(text_lengths(lessons), np.arange(len(lessons))):
        batch = micro_batch([lessons[i] for i in members], [weights[i] for i in members], ids, fed)
        assert len(members) == 1 or batch.token_ids.numel() <= MICRO_TOKENS
        row = 0
        for place, i in enumerate(members):
            text, length = lessons[i].text, batch.token_ids.shape[1]
            for j in range(text.num_rows):
                at = int(batch.rows[row])
                assert at // length == place
                known = batch.token_ids[place, : at % length + 1]
                assert known.tolist() == fed[text.tokens[: text.num_prompt + j]].tolist()
                features = batch.features[place, : at % length + 1, 0]
                assert features.tolist() == list(range(text.num_prompt + j))
                assert batch.top_ids[row].tolist() == ids[lessons[i].top_ids[j]].tolist()
                assert float(batch.weights[row]) == i + 1
                row += 1
        seen += members.tolist()
    assert sorted(seen) == list(range(len(lessons)))


def test_long_texts_keep_their_end(monkeypatch):
    monkeypatch.setattr("specinfer.distill.batches.MAX_CONTEXT", 6)
    one = lesson(4, 9)
    batch = micro_batch([one], [np.ones(9, np.float32)], np.arange(50), np.arange(50))
    assert batch.token_ids[0].tolist() == one.text.tokens[6:12].tolist()
    assert batch.top_ids.tolist() == one.top_ids[-6:].tolist()
    assert batch.features[0, :, 0].tolist() == [6, 7, 8, 9, 10, 11]  # of the token before each


def test_epochs_have_every_lesson_once_in_another_order():
    lengths = np.arange(1, 60)
    chosen = steps(lengths, 200, 2, seed=3)
    order = np.concatenate(chosen)
    assert sorted(order[:59].tolist()) == sorted(order[59:].tolist()) == list(range(59))
    assert order[:59].tolist() != order[59:].tolist()
    assert all(np.array_equal(a, b) for a, b in zip(chosen, steps(lengths, 200, 2, seed=3), strict=True))
    assert max(lengths[c].sum() for c in chosen) <= 200 + lengths.max()


def test_places_are_those_of_a_stable_sort():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 2.0, 3.0]])
    assert places(logits, np.array([2, 3, -1])).tolist() == [1, 3, MISS]
    assert places(logits, np.array([0, 0, 0])).tolist() == [3, 0, 0]


@given(st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=1, max_size=5))
def test_coverage_counts_runs_of_hits(rows):
    ranks = [np.array(row, np.uint8) for row in rows]
    table = coverage(ranks)
    for i, depth in enumerate(DEPTHS):
        starts = [row[t : t + depth] for row in rows for t in range(len(row) - depth + 1)]
        for j, width in enumerate(WIDTHS):
            expected = np.mean([max(run) < width for run in starts]) if starts else 0.0
            assert table[i][j] == pytest.approx(expected)


def test_the_target_is_its_own_perfect_draft(tiny_model):
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 300, 12), 4), Text(rng.integers(0, 300, 600), 590)]
    wanted = [text.tokens[text.num_prompt :] for text in texts]
    ranks = draft_ranks(str(tiny_model), tiny_model, texts, wanted, 300, "cpu")
    assert [len(row) for row in ranks] == [8, 10]
    assert set(ranks[1].tolist()) == {MISS}  # longer than its context
    [logits] = forced_logits(LLM(str(tiny_model), device="cpu"), texts[:1])
    best = [logits.argmax(dim=1).numpy()]
    assert draft_ranks(str(tiny_model), tiny_model, texts[:1], best, 300, "cpu")[0].tolist() == [0] * 8


def test_a_draft_on_a_subset_is_fed_and_read_in_its_own_ids(tiny_model, other_draft):
    vocab = open_checkpoint(other_draft).draft_vocab
    outside = int(np.setdiff1d(np.arange(300), vocab)[0])
    text = Text(np.array([int(vocab[5]), outside, int(vocab[7]), outside]), 2)
    [row] = draft_ranks(str(tiny_model), other_draft, [text], [text.tokens[2:]], 300, "cpu")
    assert row[0] < 200
    assert row[1] == MISS


def test_the_next_member_learns_what_the_others_miss():
    first, second = np.array([0, 3, 1], np.uint8), np.array([2, 0, MISS], np.uint8)
    assert boost_weights([], [3])[0].tolist() == [1, 1, 1]
    weights = boost_weights([[first], [second]], [3])[0]
    assert weights.tolist() == pytest.approx([FOUND_WEIGHT, FOUND_WEIGHT, 1.0])
    assert union([[first], [second]])[0].tolist() == [0, 0, 1]


def test_members_are_compared_at_the_same_number_of_candidates():
    first, second = [np.array([0, 9, 9, 9], np.uint8)], [np.array([9, 0, 9, 9], np.uint8)]
    larger = [np.array([0, 1, 1, 9], np.uint8)]
    result = compare([first, second], larger, [1.0, 2.0, 4.0])
    assert [row["depths"][0] for row in result["rows"]] == [0.25, 0.5, 0.25, 0.75]
    assert [row["milliseconds"] for row in result["rows"]] == [1.0, 3.0, 4.0, 4.0]
    assert "one larger draft wins" in result["verdict"]


def test_a_curve_is_a_picture():
    point = {"step": 5.0, "loss": 4.0, "top1": 0.1, "top2": 0.2, "top3": 0.3, "top4": 0.4}
    root = ElementTree.fromstring(curve([point, {**point, "step": 10.0, "loss": 2.0}]))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 5
    assert curve([]).startswith("<svg")
