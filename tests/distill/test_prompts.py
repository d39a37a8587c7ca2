from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from specinfer import ConfigError, RequestError
from specinfer.distill.prompts import PARTS, Prompt, digest, part_of, read_prompts
from specinfer.distill.seeds import Grammar, built_in_prompts


def test_thousands_of_different_prompts_of_every_kind():
    prompts = built_in_prompts(5000, seed=0)
    assert len({p.messages for p in prompts}) == 5000
    counts = Counter(p.kind for p in prompts)
    kinds = {"chat", "code", "arithmetic", "extraction", "translation", "summary", "conversation"}
    assert kinds <= set(counts)
    assert min(counts.values()) >= 300
    for prompt in prompts:
        roles = [role for role, _ in prompt.messages]
        assert roles == ["user", "assistant", "user"][: len(roles)]
        assert len(roles) in (1, 3)


def test_a_seed_names_its_prompts_and_more_of_them_begin_alike():
    assert built_in_prompts(60, seed=1) == built_in_prompts(90, seed=1)[:60]
    assert built_in_prompts(60, seed=1) != built_in_prompts(60, seed=2)


@pytest.mark.parametrize("table", ["kinds", "passages", "readings"])
def test_every_template_and_line_can_be_filled(table):
    grammar = Grammar.built_in(table, written=["x"])
    for templates in grammar.kinds.values():
        for template in templates:
            text = grammar.fill(template, random.Random(0))
            assert not any(f"{{{name}" in text for name in grammar.rules), text


def test_what_a_grammar_says():
    grammar = Grammar({"k": ["{a.1} {a.1} {2-3}\n----\n{b}"]}, {"a": ["x", "y"], "b": ["<{a}>"]})
    texts = {grammar.fill("{a.1}{a.1}{2-3}{b}", random.Random(i)) for i in range(200)}
    assert texts == {f"{a}{a}{n}<{b}>" for a in "xy" for n in (2, 3) for b in "xy"}
    prompts = list(grammar.prompts(0))  # ends when nothing new is left
    assert len({p.messages for p in prompts}) == len(prompts) <= 8
    assert [role for role, _ in prompts[0].messages] == ["user", "assistant"]


def test_parts_are_stable_and_about_1_in_20():
    known = {0: "train", 1: "train", 2: "train", 3: "train"}
    assert {n: part_of([n]) for n in known} == known
    counts = Counter(part_of([n, 7]) for n in range(4000))
    assert set(counts) == set(PARTS)
    assert 140 < counts["validation"] < 260
    assert 140 < counts["test"] < 260


def test_files_of_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}], "kind": "chat"},
        {"prompt": "The sea"},
        {"turns": ["One?", "Two?"], "category": "writing", "question_id": 1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(path) == [
        Prompt("chat", (("user", "Hi"),)),
        Prompt("prompt", text="The sea"),
        Prompt("writing", (("user", "One?"),)),
    ]
    text = tmp_path / "p.txt"
    text.write_text("One line\nand more.\n\n\nTwo.\n")
    assert read_prompts(text) == [Prompt("text", text="One line\nand more."), Prompt("text", text="Two.")]
    assert digest(read_prompts(path)) != digest(read_prompts(text))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no prompts"),
        ("{", "p.jsonl:1: not JSON"),
        ('{"prompt": "a"}\n[1]', "p.jsonl:2"),
        ("{}", "turns"),
    ],
)
def test_files_that_hold_none(tmp_path, content, words):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises((ConfigError, RequestError), match=words):
        read_prompts(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")
