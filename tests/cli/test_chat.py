from __future__ import annotations

import pytest

from specinfer.models.tokenizer import Tokenizer

SETTINGS = ("--max-tokens", "8")


@pytest.fixture
def conversations(monkeypatch):
    """What the chat template was given, one entry a turn."""
    seen = []
    apply = Tokenizer.apply_chat_template

    def watched(self, messages):
        seen.append([dict(m) for m in messages])
        return apply(self, messages)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", watched)
    return seen


def test_each_line_of_a_pipe_is_a_turn(tiny, conversations):
    result = tiny("chat", *SETTINGS, stdin="Hello\n\nAnd then?\n")
    assert result.code == 0
    first, second = conversations[1:]  # [0] asks whether there is a template
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[0] == first[0] == {"role": "user", "content": "Hello"}
    assert second[2]["content"] == "And then?"
    assert result.out.startswith(second[1]["content"] + "\n")
    assert "\x1b" not in result.out
    assert "--max-tokens" in result.err


def test_json_is_one_line_a_turn(tiny):
    result = tiny("chat", *SETTINGS, "--json", stdin="Hello\nMore\n")
    assert [(r["turn"], r["prompt"]) for r in result.lines] == [(1, "Hello"), (2, "More")]
    assert all(len(r["token_ids"]) == 8 for r in result.lines)


def test_commands(tiny, conversations):
    result = tiny("chat", *SETTINGS, stdin="Hello\n/stats\n/reset\n/what\nAgain\n/exit\nnever asked\n")
    assert result.code == 0
    assert [len(c) for c in conversations[1:]] == [1, 1]
    assert conversations[-1][0]["content"] == "Again"
    assert "1 answer, 8 tokens" in result.err
    assert "/what is not a command" in result.err


def test_a_full_context_says_the_way_out(tiny):
    turns = "Hello\nMore\n/reset\n" + "x" * 99 + "\nHi\n"
    result = tiny("chat", "--max-model-len", "64", "--max-tokens", "1000", stdin=turns)
    assert result.code == 0
    assert [line.split(" (")[0] for line in result.err.splitlines()] == [
        "the context is full; /reset starts a new conversation",
        "the context of 64 tokens is full",
        "the conversation is empty again",
        "the context of 64 tokens is full",
        "the context is full; /reset starts a new conversation",
    ]


def test_ctrl_c_stops_the_answer_and_not_the_chat(tiny, press_ctrl_c, conversations):
    engines = press_ctrl_c(3)
    result = tiny("chat", "--max-tokens", "50", stdin="Hello\nMore\n")
    assert result.code == 0
    assert "stopped" in result.err
    assert len(conversations[-1]) == 3
    assert not engines[0].has_work
    engines[0].check_integrity()


def test_at_a_terminal(tiny, at_terminal, monkeypatch):
    typed = iter(["Hello", KeyboardInterrupt, "/stats", EOFError])

    def type_line(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    result = tiny("chat", *SETTINGS, stdin=at_terminal(""))
    assert result.code == 0
    assert "/reset forgets" in result.err
    assert "Ctrl-D or /exit leaves" in result.err
    assert "1 answer" in result.err
    assert next(typed, None) is None
