"""What the target asks itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer import LLM, ConfigError
from specinfer.distill import passages
from specinfer.distill.answers import AnswerFile
from specinfer.distill.questions import own_questions, user_turn
from specinfer.distill.settings import NUM_QUESTIONS, DistillSettings


def test_questions_come_from_where_a_user_speaks(tiny_model: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model), dtype="float32")
    start = user_turn(llm.tokenizer)
    conversation = llm.tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])
    assert start and conversation[: len(start)] == start
    assert llm.tokenizer.decode(conversation[len(start) :]).startswith("abc")

    def ask(name: str, count: int) -> list[str]:
        file = AnswerFile(tmp_path / name)
        questions = own_questions(llm, count, 3, file, max_num_seqs=8, quiet=True)
        assert all(question.kind == "own" for question in questions)
        return [text for question in questions for _, text in question.messages]

    texts = ask("questions.jsonl", 24)
    written = AnswerFile(tmp_path / "questions.jsonl").read()
    assert all(answer.prompt == start for answer in written.values())
    ended = [a for _, a in sorted(written.items()) if a.answer[-1] in llm.tokenizer.eos_token_ids]
    wanted = [llm.tokenizer.decode(a.answer[:-1]).strip() for a in ended]
    assert texts == list(dict.fromkeys(filter(None, wanted))) and 0 < len(texts) < 24
    ask("resumed.jsonl", 10)
    assert ask("resumed.jsonl", 24) == texts


def test_they_are_answered_like_other_prompts(distil, tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(passages, "MAX_TOKENS", 20)
    distillation = distil(tmp_path, num_questions=24)
    distillation.write()
    questions = AnswerFile(tmp_path / "data" / "questions.jsonl").read()
    kinds = {answer.kind for answer in AnswerFile(tmp_path / "data" / "answers.jsonl").read().values()}
    assert len(questions) == 24 and kinds > {"say", "prompt", "own", "article_summary"}
    with pytest.raises(ConfigError, match="its num_questions is 24"):
        distil(tmp_path / "other", tmp_path / "data", num_questions=25)


def test_how_many(tiny_model: Path) -> None:
    def meant(is_chat: bool, **changes: object) -> int:
        return DistillSettings(target="x", **changes).questions(is_chat)

    assert (meant(True), meant(False)) == (NUM_QUESTIONS, 0)
    assert meant(True, prompts=tiny_model) == 0 and meant(True, prompts=tiny_model, num_questions=5) == 5
    with pytest.raises(ConfigError, match="no chat template"):
        meant(False, num_questions=5)
    with pytest.raises(ConfigError, match="num_questions"):
        meant(True, num_questions=-1)
