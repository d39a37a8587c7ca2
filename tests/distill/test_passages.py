"""What the target writes, and is asked about."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer import LLM
from specinfer.distill import passages
from specinfer.distill.answers import AnswerFile
from specinfer.distill.passages import PLACE, own_passages, readings
from specinfer.distill.prompts import Prompt


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32")


def ask(llm: LLM, path: Path, count: int) -> list[Prompt]:
    return own_passages(llm, count, 3, AnswerFile(path), max_num_seqs=8, quiet=True)


def test_it_is_asked_about_what_it_wrote(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "MAX_TOKENS", 20)
    prompts = ask(llm, tmp_path / "passages.jsonl", 12)
    answers = AnswerFile(tmp_path / "passages.jsonl").read()
    decode, ends = llm.tokenizer.decode, llm.tokenizer.eos_token_ids
    texts = [decode([t for t in a.answer if t not in ends]).strip() for _, a in sorted(answers.items())]
    assert len(answers) == 12 and prompts == readings(texts, 3)


def test_every_passage_stands_in_one_prompt() -> None:
    texts = [f"passage {i} {{name}} \n----\n ." for i in range(60)]  # of which a grammar would make something
    prompts = readings(texts, 0)
    contents = [content for prompt in prompts for _, content in prompt.messages]
    assert len(contents) == len(prompts) and PLACE not in "".join(contents)
    assert [sum(text in content for content in contents) for text in texts] == [1] * 60
    for prompt, content in zip(prompts, contents, strict=True):
        assert (prompt.kind == "foreign") != any(text in content for text in texts)
    assert readings([], 0) == []


def test_a_resumed_writing_asks_the_same(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "MAX_TOKENS", 20)
    ask(llm, tmp_path / "resumed.jsonl", 5)
    assert ask(llm, tmp_path / "resumed.jsonl", 12) == ask(llm, tmp_path / "whole.jsonl", 12)


def test_nothing_is_asked_where_no_passage_fits(tiny_model: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model), dtype="float32", max_model_len=100)
    assert ask(llm, tmp_path / "passages.jsonl", 5) == []
