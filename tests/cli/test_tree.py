from __future__ import annotations

import pytest


def test_json(tiny):
    record = tiny("tree", "Hello", "--tree", "3,2,1", "--json").json
    nodes = record["nodes"]
    assert len(nodes) == 1 + 3 + 6 + 6
    assert nodes[0]["parent"] is None and nodes[0]["depth"] == 0
    for node in nodes[1:]:
        assert nodes[node["parent"]]["depth"] == node["depth"] - 1
        assert 0 <= node["score"] <= 1
        assert isinstance(node["text"], str)
    assert [n["node"] for n in nodes if n["accepted"]] == [0, *record["accepted"]][1:]
    path = [nodes[n]["token_id"] for n in record["accepted"]]
    assert record["token_ids"] == [*path, record["next_token"]["token_id"]]


def test_steps_follow_the_text(sure):
    text = sure("generate", "Hello", "--max-tokens", "13", "--json").json["outputs"][0]["token_ids"]
    emitted = text[:1]
    for step in (1, 2, 3):
        record = sure("tree", "Hello", "--tree", "2,2,1", "--steps", str(step), "--json").json
        assert record["nodes"][0]["token_id"] == emitted[-1]
        assert len(record["accepted"]) == 3
        emitted += record["token_ids"]
    assert emitted == text


@pytest.mark.parametrize("run", ["sure", "tiny"])
def test_drawn(run, request):
    run = request.getfixturevalue(run)
    record = run("tree", "Hello", "--tree", "2,1", "--json").json
    drawn = run("tree", "Hello", "--tree", "2,1").out
    assert len(drawn.splitlines()) == 1 + len(record["nodes"])
    assert drawn.count("accepted") == len(record["accepted"])
    assert drawn.count("the target's next token") == 1
    assert repr(record["nodes"][1]["text"]) in drawn
    assert "\x1b" not in drawn


def test_a_long_chain_is_not_wrapped(tiny):
    drawn = tiny("tree", "Hello", "--tree", ",".join("1" * 40)).out
    assert len(drawn.splitlines()) == 42


def test_a_prompt_of_one_token(tiny):
    assert len(tiny("tree", "H", "--tree", "2,1", "--json").json["nodes"]) == 5


def test_without_a_draft_there_is_a_note(specinfer, tiny_model):
    result = specinfer("tree", "Hello", "-m", tiny_model, "-d", "none")
    assert result.code == 0
    assert "no draft" in result.err
    assert len(result.out.splitlines()) == 2


@pytest.mark.parametrize("command", ["tree", "generate"])
def test_an_empty_prompt(specinfer, command):
    specinfer(command, "").assert_error(2, "empty")


def test_a_step_after_the_end(tiny):
    tiny("tree", "Hello", "--steps", "50", "--max-tokens", "3").assert_error(2, "step 50", "is the last")
