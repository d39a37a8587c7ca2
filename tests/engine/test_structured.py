"""Structured outputs through the engine: whole, ended in time, and sooner where tokens are forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, RequestError, SamplingParams, StructuredOutputsParams
from specinfer.verify.verifier import VERIFIER_NAMES

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "ages", "colour"],
    "additionalProperties": False,
}
BOUNDED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)


@contextmanager
def no_forced_tokens(llm: LLM) -> Iterator[None]:
    before = llm.engine.parts
    llm.engine.parts = replace(before, max_forced_tokens=0)
    try:
        yield
    finally:
        llm.engine.parts = before


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "ages", "colour"] and json.dumps(found) == text
    assert found["name"].isalpha() and 1 <= len(found["name"]) <= 6
    assert len(found["ages"]) <= 3 and all(0 <= age <= 99 for age in found["ages"])
    assert found["colour"] in ("red", "green")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_free(tiny_llm: LLM, temperature: float) -> None:
    """Without any draft: the same tokens in far fewer steps, and every forced token is right."""
    params = SamplingParams(
        structured_outputs=BOUNDED, temperature=temperature, seed=1, max_tokens=96, n=4, logprobs=1
    )
    with no_forced_tokens(tiny_llm):
        plain = tiny_llm.generate([1, 2], params)[0].outputs
    fast = tiny_llm.generate([1, 2], params)[0].outputs
    tiny_llm.engine.check_integrity()
    for expected, done in zip(plain, fast, strict=True):
        assert (done.token_ids, done.text, done.logprobs) == (
            expected.token_ids,
            expected.text,
            expected.logprobs,
        )
        check(done.text)
        assert done.finish_reason == "stop"
        assert done.stats.num_accepted_tokens == done.stats.num_draft_tokens
        assert expected.stats.num_draft_tokens == 0
        assert done.stats.num_steps < 0.6 * expected.stats.num_steps


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_every_verifier_stays_in_the_grammar(
    tiny_model: Path, tiny_draft: Path, other_draft: Path, verifier: str
) -> None:
    llm = LLM(
        str(tiny_model),
        drafts=[str(tiny_draft), str(other_draft), "ngram"],
        tree="2,2,1",
        verifier=verifier,
        dtype="float32",
    )
    params = SamplingParams(structured_outputs=BOUNDED, seed=2, max_tokens=96, n=6)
    for done in llm.generate([1, 2], params)[0].outputs:
        check(done.text)
        assert done.finish_reason == "stop" and done.stats.num_accepted_tokens > 30
    llm.engine.check_integrity()


def test_limits_of_the_tree_and_of_the_output(tiny_llm: LLM) -> None:
    """However little is left to write, forced tokens keep within it."""
    params = SamplingParams(structured_outputs=BOUNDED, temperature=0.0, max_tokens=96)
    whole = tiny_llm.generate([1, 2], params)[0].outputs[0].token_ids
    for max_tokens in range(1, 24):
        [done] = tiny_llm.generate([1, 2], replace(params, max_tokens=max_tokens))[0].outputs
        assert (done.token_ids, done.finish_reason) == (whole[:max_tokens], "length")
    [done] = tiny_llm.generate([1, 2], replace(params, stop=['"ages'], include_stop_str_in_output=True))[
        0
    ].outputs
    assert done.text.endswith('"ages') and done.finish_reason == "stop"
    tiny_llm.engine.check_integrity()


def test_a_committed_token_out_of_the_grammar_is_a_bug_that_shows(
    tiny_model: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known wrong way, every node masked by the committed tokens alone: plain decoding goes on."""
    from specinfer.sampling.grammar import Grammar

    right = Grammar.apply
    monkeypatch.setattr(Grammar, "apply", lambda self, x, history, path: right(self, x, history, ()))
    params = SamplingParams(structured_outputs=BOUNDED, seed=1, max_tokens=96)
    plain = LLM(str(tiny_model), dtype="float32")
    with no_forced_tokens(plain):
        check(plain.generate([1, 2], params)[0].outputs[0].text)
    for llm in (plain, LLM(str(tiny_model), drafts=[str(tiny_draft)], tree="2,1,1", dtype="float32")):
        with pytest.raises(AssertionError, match="not in the grammar"):
            llm.generate([1, 2], params)
        llm.engine.check_integrity()


REFUSED: list[tuple[Any, str]] = [
    ({"regex": "(ab"}, r"structured_outputs.regex cannot be compiled: .*unclosed group"),
    ({"grammar": "start: foo"}, 'structured_outputs.grammar cannot be compiled: .*unknown name: "foo"'),
    ({"grammar": "root ::= ("}, "structured_outputs.grammar cannot be compiled"),
    ({"json": {"type": "foo"}}, "structured_outputs.json cannot be compiled: Invalid type: foo"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "json cannot be compiled: Unsatisfiable"),
    ({"json": "{"}, "structured_outputs.json is not JSON"),
    ({"json": [1]}, "structured_outputs.json must be a JSON schema"),
    ({"choice": []}, "structured_outputs.choice must be a list of non-empty texts"),
    ({"choice": ["a", ""]}, "structured_outputs.choice must be a list of non-empty texts"),
    ({"regex": ""}, "structured_outputs.regex must be a text"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs has regex and choice"),
    ({}, "structured_outputs has none of json, json_object, regex"),
    ({"xml": "a"}, "structured_outputs.xml is not known"),
    (7, "structured_outputs must map one of json"),
]


@pytest.mark.parametrize(("form", "message"), REFUSED)
def test_refused(tiny_llm: LLM, form: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny_llm.engine.add_request([1, 2], SamplingParams(structured_outputs=form))
    assert not tiny_llm.engine.has_work


def test_refused_without_an_end(tmp_path: Path, write_model: Any) -> None:
    with pytest.raises(RequestError, match="end at an end token"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    llm = LLM(str(write_model(tmp_path / "bare", tokenizer=False)), dtype="float32")
    with pytest.raises(RequestError, match="need a tokenizer"):
        llm.generate([1, 2], SamplingParams(structured_outputs={"regex": "a"}))


def test_the_real_target(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), drafts=["ngram"], dtype="bfloat16", max_model_len=256, max_num_seqs=3)
    prompts = [[{"role": "user", "content": f"Describe {who} as JSON."}] for who in ("Ann", "a cat", "Tom")]
    params = SamplingParams(structured_outputs=BOUNDED, temperature=0.7, seed=5, max_tokens=64)
    fast = [o.outputs[0] for o in llm.chat(prompts, params)]
    with no_forced_tokens(llm):
        plain = [o.outputs[0] for o in llm.chat(prompts, params)]
    assert [done.token_ids for done in fast] == [done.token_ids for done in plain]
    for done in fast:
        check(done.text)
        assert done.finish_reason == "stop"
    assert sum(d.stats.num_steps for d in fast) < 0.7 * sum(d.stats.num_steps for d in plain)
