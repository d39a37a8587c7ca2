from __future__ import annotations

import dataclasses

import pytest

from specinfer.engine.request import Request

SETTINGS = ("--max-tokens", "16", "--tree", "2,1")


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_json(tiny, temperature):
    record = tiny("demo", *SETTINGS, "--temperature", temperature, "--json").json
    assert [p["kind"] for p in record["prompts"]] == ["prose", "code", "arithmetic"]
    for result in (*record["prompts"], record["all"]):
        assert result["is_identical"]
        assert result["plain_tokens_per_second"] > 0
        assert result["speedup"] > 0
        assert result["acceptance_length"] >= 1
    assert record["prompts"][0]["plain"]["token_ids"] == record["prompts"][0]["speculative"]["token_ids"]
    assert record["prompts"][0]["plain"]["stats"]["num_draft_tokens"] == 0
    assert record["prompts"][0]["speculative"]["stats"]["num_draft_tokens"] > 0


def test_texts_then_a_table_then_the_verdict(tiny):
    result = tiny("demo", *SETTINGS)
    assert result.code == 0
    assert result.out.count("[without speculation]") == result.out.count("[with speculation]") == 3
    assert "\x1b[" not in result.out  # a random model may say a lone escape
    lines = result.out.splitlines()
    assert max(map(len, lines[-12:])) <= 80
    assert lines[-1].endswith("times as fast with speculation, all tokens identical")
    for row in ("prose", "code", "arithmetic", "all"):
        [line] = [line for line in lines[-9:-1] if f" {row} " in line]
        assert line.count("yes") == 1


def test_different_tokens_are_a_failure(tiny, monkeypatch):
    completion = Request.completion

    def spoilt(self):
        output = completion(self)
        return dataclasses.replace(output, token_ids=(0,)) if output.stats.num_draft_tokens else output

    monkeypatch.setattr(Request, "completion", spoilt)
    result = tiny("demo", *SETTINGS)
    assert result.code == 1
    assert "tokens identical in 0 of 3 texts" in result.out
    assert " NO " in result.out


def test_a_verifier_that_draws_anew_need_not_repeat_itself(tiny):
    result = tiny("demo", *SETTINGS, "--verifier", "multi_step", "--temperature", "1")
    assert result.code == 0
    assert "tokens may differ" in result.err
