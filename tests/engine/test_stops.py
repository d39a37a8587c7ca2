"""Where a text ends inside an accepted chunk: text, tokens, log probabilities and reason end at one place."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from specinfer import LLM, SamplingParams
from specinfer.outputs import CompletionOutput

PROMPT = [10, 20, 30, 40, 50]
ANSWER = "xaSTOPPERyz"
END = 257


def run(llm: LLM, params: SamplingParams) -> CompletionOutput:
    [request] = llm.engine.add_request(PROMPT, params)
    while llm.engine.has_work:
        llm.engine.step()
    return request.completion()


def naive(text: str, stops: list[str], include: bool, min_tokens: int) -> tuple[str, int, str, str | None]:
    """One token is one character: (text, number of tokens, finish reason, stop reason)."""
    for n in range(min_tokens + 1, len(text) + 1):
        ended = sorted((n - len(s), s) for s in stops if text[:n].endswith(s))
        if ended:
            at, stop = ended[0]
            return text[: at + len(stop) if include else at], n, "stop", stop
    return text, len(text), "length", None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "min_tokens"), [(["STOPPER"], 0), (["PPER", "TOPPE", "RyQ"], 0), (["a", "STOP", "PE"], 4)]
)
def test_every_split_of_a_stop_string(
    tiny_llm: LLM, put: Any, oracle: Any, script: Any, stops: list[str], min_tokens: int, include: bool
) -> None:
    """A chunk ends after each token that was proposed wrong: every set of places in and about the string."""
    answer = tiny_llm.tokenizer.encode(ANSWER)
    params = SamplingParams(
        seed=0, max_tokens=len(answer), stop=stops, min_tokens=min_tokens, logprobs=2,
        include_stop_str_in_output=include,
    )  # fmt: skip
    with put(tiny_llm, chooser=script([answer])):
        plain = run(tiny_llm, params)
    text, num_tokens, finish_reason, stop_reason = naive(ANSWER, stops, include, min_tokens)
    assert plain.logprobs is not None
    for num_wrong in range(7):
        for wrong_at in combinations(range(2, 8), num_wrong):
            drafter = oracle([answer], len(answer), wrong_at)
            with put(tiny_llm, chooser=script([answer]), drafter=drafter, max_tree_nodes=16):
                done = run(tiny_llm, params)
            assert (done.text, done.finish_reason, done.stop_reason) == (text, finish_reason, stop_reason)
            assert done.token_ids == tuple(answer[:num_tokens])
            assert done.logprobs == plain.logprobs
            assert len(done.logprobs) == num_tokens == len(done.token_ids)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_text_of_an_end_token(
    tiny_llm: LLM, put: Any, oracle: Any, script: Any, special: bool, include: bool
) -> None:
    """It is text only with include_stop_str_in_output; the model's own is special, too."""
    letters = tiny_llm.tokenizer.encode("abcdef")
    end = END if special else letters[3]
    answer = [*letters[:3], end, *letters[4:]]
    settings: dict[str, Any] = {} if special else {"stop_token_ids": [end]}
    for skip in (True, False):
        params = SamplingParams(
            max_tokens=6, include_stop_str_in_output=include, skip_special_tokens=skip, **settings
        )
        with put(tiny_llm, chooser=script([answer]), drafter=oracle([answer], 5)):
            done = run(tiny_llm, params)
        shown = "" if not include else "d" if not special else "" if skip else "<|end|>"
        assert done.text == "abc" + shown
        assert done.token_ids == tuple(answer[:4])
        assert (done.finish_reason, done.stop_reason) == ("stop", None if special else end)


def test_special_tokens_in_the_text(tiny_llm: LLM, put: Any, script: Any) -> None:
    answer = [*tiny_llm.tokenizer.encode("ab"), 256, *tiny_llm.tokenizer.encode("cd")]
    for skip, text in ((True, "abcd"), (False, "ab<|start|>cd")):
        with put(tiny_llm, chooser=script([answer])):
            done = run(tiny_llm, SamplingParams(max_tokens=5, skip_special_tokens=skip))
        assert done.text == text


def test_a_text_goes_on_from_its_prompt(
    tmp_path: Path, write_model: Any, sentencepiece: Tokenizer, save_tokenizer: Any, put: Any, script: Any
) -> None:
    """The space before its first word is part of it, also where a tokenizer leaves out a whole text's."""
    path = save_tokenizer(sentencepiece, write_model(tmp_path, tokenizer=False), bos_token="<s>")
    llm = LLM(str(path), dtype="float32")
    prompt, whole = llm.tokenizer.encode("the an"), llm.tokenizer.encode("the an ab the 12 thé")
    assert whole[: len(prompt)] == prompt
    for stop, text in ((), " ab the 12 thé"), (" ab", ""), (" the", " ab"):
        params = SamplingParams(max_tokens=len(whole) - len(prompt), stop=stop)
        with put(llm, chooser=script([whole[len(prompt) :]])):
            assert llm.generate("the an", params)[0].outputs[0].text == text


def test_what_a_stream_sends_is_never_taken_back(tiny_llm: LLM, put: Any, oracle: Any, script: Any) -> None:
    answer = tiny_llm.tokenizer.encode(ANSWER)
    for include in (True, False):
        params = SamplingParams(
            max_tokens=11, stop=["PPER", "TOPPE"], logprobs=0, include_stop_str_in_output=include
        )
        with put(tiny_llm, chooser=script([answer]), drafter=oracle([answer], 3)):
            chunks = list(tiny_llm.stream(PROMPT, params))
        assert chunks[-1].output is not None
        assert "".join(c.text for c in chunks) == chunks[-1].output.text
        assert chunks[-1].output.text == ("xaSTOPPE" if include else "xaS")
        assert tuple(x for c in chunks for x in c.logprobs or ()) == chunks[-1].output.logprobs
