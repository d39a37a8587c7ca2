from __future__ import annotations

import io
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specinfer import LLM, ConfigError, SamplingParams, SpecinferError
from specinfer.distill import lessons
from specinfer.distill.answers import Answer, AnswerFile, open_for_append
from specinfer.distill.forcing import Text, forced_logits
from specinfer.distill.lessons import TOP_K, Lesson, pack, top_rows, unpack
from specinfer.distill.vocabulary import choose_vocab, draft_ids, token_counts


class HalfFull(io.RawIOBase):
    """A disk with room for half a line."""

    def write(self, line):
        return len(line) // 2


def test_a_torn_last_line_is_dropped_and_written_again(tmp_path):
    file = AnswerFile(tmp_path / "answers.jsonl")
    answers = {i: Answer(i, "chat", 0.0, [1, 2], [3, i]) for i in range(3)}
    with open_for_append(file.path) as sink:
        for answer in answers.values():
            file.append(answer, sink)
    content = file.path.read_bytes()
    for cut in range(1, len(content.splitlines()[-1]) + 1):
        file.path.write_bytes(content[:-cut])
        assert file.read() == {0: answers[0], 1: answers[1]}
        with open_for_append(file.path) as sink:
            file.append(answers[2], sink)
        assert file.path.read_bytes() == content
    with pytest.raises(SpecinferError, match="No space left"):
        file.append(answers[2], HalfFull())
    file.path.write_bytes(content + b"{}\n")
    with pytest.raises(ConfigError, match=r"answers.jsonl:4 is not an answer"):
        file.read()


def test_top_rows_are_the_best_with_their_probabilities():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 3:] = -torch.inf
    ids, logprobs = top_rows(logits)
    expected = logits.log_softmax(dim=1)
    for row in range(5):
        order = expected[row].argsort(descending=True, stable=True)[:TOP_K]
        finite = expected[row, order] > -torch.inf
        assert ids[row][finite.numpy()].tolist() == order[finite].tolist()
        assert np.allclose(logprobs[row][finite.numpy()], expected[row, order][finite], atol=0.01)
    assert np.exp(logprobs[0].astype(np.float32))[3:].max() == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 99))
def test_lessons_survive_being_stored(tmp_path_factory, sizes, seed):
    rng = np.random.default_rng(seed)
    lessons = [
        Lesson(
            f"kind {i}",
            float(i % 2),
            Text(rng.integers(0, 300, prompt + answer), prompt),
            rng.integers(0, 300, (answer, 4)).astype(np.int32),
            rng.normal(-3, 1, (answer, 4)).astype(np.float16),
        )
        for i, (prompt, answer) in enumerate(sizes)
    ]
    path = tmp_path_factory.mktemp("lessons") / "lessons.safetensors"
    path.write_bytes(pack(lessons))
    for mine, stored in zip(lessons, unpack(path), strict=True):
        assert (mine.kind, mine.temperature, mine.part) == (stored.kind, stored.temperature, stored.part)
        assert (mine.text.tokens.tolist(), mine.text.num_prompt) == (
            stored.text.tokens.tolist(), stored.text.num_prompt
        )  # fmt: skip
        assert np.array_equal(mine.top_ids, stored.top_ids)
        assert np.array_equal(mine.top_logprobs, stored.top_logprobs)


def test_lessons_leave_memory_with_their_shard(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "ANSWERS_PER_SHARD", 2)
    score, seen = lessons.score, []

    def watched(*arguments):
        assert sum(lesson() is not None for lesson in seen) <= 1  # the last one still has a name
        for lesson, hidden in score(*arguments):
            seen.append(weakref.ref(lesson))
            yield lesson, hidden

    monkeypatch.setattr(lessons, "score", watched)
    answers = [Answer(i, "chat", 0.0, [1, 2, i], [3, i]) for i in range(6)]
    made = lessons.make_lessons(LLM(str(tiny_model), device="cpu"), answers, tmp_path, quiet=True)
    assert [lesson.text.tokens.tolist() for lesson in made] == [a.prompt + a.answer for a in answers]
    assert len(seen) == 6


def test_a_damaged_shard_is_named(tmp_path):
    path = tmp_path / "lessons-00000.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"lessons-00000.safetensors is damaged"):
        unpack(path)


def test_forced_logits_are_those_that_answers_were_chosen_from(tiny_model):
    llm = LLM(str(tiny_model), dtype="float32", prefix_cache=False)
    prompts = [[1, 2, 3], list(range(200)), [9], [9, 8]]
    results = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n) for n in (20, 20, 1, 20)])
    texts = [
        Text(np.array([*prompt, *r.outputs[0].token_ids]), len(prompt))
        for prompt, r in zip(prompts, results, strict=True)
    ]
    for text, logits in zip(texts, forced_logits(llm, texts), strict=True):
        assert logits.argmax(dim=1).tolist() == text.tokens[text.num_prompt :].tolist()
    # Answers to one prompt share its rows, and have the bits that each has alone.
    family = [Text(np.array([5, 6, 7, *answer]), 3) for answer in ([8, 9, 10], [11], [8, 12])]
    alone = [next(iter(forced_logits(llm, [text]))) for text in family]
    assert all(map(torch.equal, forced_logits(llm, family), alone))
    llm.engine.check_integrity()


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 40), st.data())
def test_the_most_frequent_tokens_and_the_end_are_kept(counts, size, data):
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=min(2, size)))
    vocab = choose_vocab(np.array(counts, float), size, always)
    if vocab is None:
        assert size >= len(counts)
        assert draft_ids(None, len(counts)).tolist() == list(range(len(counts)))
        return
    assert len(vocab) == size == len(set(vocab.tolist()))
    assert always <= set(vocab.tolist())
    rank = {token: (token not in always, -counts[token], token) for token in range(len(counts))}
    assert set(vocab.tolist()) == set(sorted(rank, key=rank.__getitem__)[:size])
    assert vocab[0] == max(vocab.tolist(), key=rank.__getitem__)
    assert vocab[1:].tolist() == sorted(vocab[1:].tolist())
    back = draft_ids(vocab, len(counts))
    assert back[vocab].tolist() == list(range(size))
    assert (back >= 0).sum() == size


def test_counts_are_of_texts_and_of_what_the_target_expects():
    text = Text(np.array([1, 1, 2]), 2)
    lesson = Lesson(
        "k", 0.0, text, np.array([[2, 3]], np.int32), np.log(np.array([[0.5, 0.25]])).astype("f2")
    )
    assert np.allclose(token_counts([lesson], 5), [0, 2, 1.5, 0.25, 0], atol=1e-3)
