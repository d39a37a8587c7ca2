"""Parameters that do not fit the model are one clear error, before any work."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from specinfer import LLM, RequestError, SamplingParams
from specinfer.engine.vocabulary import bad_word_tokens
from specinfer.models.tokenizer import Tokenizer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {300: 1.0}}, r"logit_bias names token 300: ids must be in \[0, 299\]"),
    ({"allowed_token_ids": [1, 4000]}, r"allowed_token_ids names token 4000: ids must be in \[0, 299\]"),
    ({"logit_bias": dict.fromkeys(range(300), -inf)}, "leave no token"),
    ({"stop_token_ids": [300]}, r"stop_token_ids names token 300: ids must be in \[0, 299\]"),
    ({"allowed_token_ids": [3], "logit_bias": {3: -inf}}, "leave no token"),
    ({"allowed_token_ids": [64], "bad_words": ["a"]}, "leave no token"),
    ({"allowed_token_ids": [64, 65], "bad_words": ["ba", "ab"]}, "leave no token"),
    ({"allowed_token_ids": [257, 5], "min_tokens": 1, "stop_token_ids": [5]}, "leave no token"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refused(tiny_llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny_llm.engine.add_request([1, 2], SamplingParams(**fields))
    assert not tiny_llm.engine.has_work


def test_one_token_left_is_enough(tiny_llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=[64, 65], bad_words=["b"], logit_bias={65: -inf}, max_tokens=4)
    [request] = tiny_llm.engine.add_request([1, 2], params)
    while tiny_llm.engine.has_work:
        tiny_llm.engine.step()
    assert request.output_token_ids == [64] * 4


def test_without_a_tokenizer(tmp_path: Path, write_model: Any) -> None:
    """Text is an error; the model's end token is known from its config."""
    llm = LLM(str(write_model(tmp_path / "bare", tokenizer=False)), dtype="float32")
    for fields in ({"stop": "a"}, {"bad_words": ["a"]}):
        with pytest.raises(RequestError, match="need a tokenizer"):
            llm.generate([1, 2], SamplingParams(**fields))
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=2, logit_bias={257: 100})
    [done] = llm.generate([1, 2], params)[0].outputs
    assert (done.finish_reason, len(done.token_ids), done.token_ids[-1]) == ("stop", 3, 257)


def test_bad_words_as_tokens_with_and_without_a_space() -> None:
    class Words:
        """A tokenizer of six texts."""

        table = {"cat": [1], " cat": [2], "dog": [3], " dog": [9, 3], "catdog": [1, 3], " catdog": [2, 3]}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return self.table.get(text, [])

    params = SamplingParams(bad_words=["cat", "dog", "catdog"])
    assert bad_word_tokens(params, Words()) == [[1], [2], [3], [1, 3], [2, 3]]  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="'cow', which has no tokens"):
        bad_word_tokens(SamplingParams(bad_words="cow"), Words())  # type: ignore[arg-type]


def test_bad_words_within_a_text_of_pieces(
    tmp_path: Path, sentencepiece: Backend, save_tokenizer: Any
) -> None:
    """A text's first word is read as if a space came first; within a text, the same word is another token."""
    tokenizer = Tokenizer.from_directory(save_tokenizer(sentencepiece, tmp_path, bos_token="<s>"))
    words = bad_word_tokens(SamplingParams(bad_words=["the"]), tokenizer)
    assert [tokenizer.spellings[token] for [token] in words] == [b" the", b"the"]


def test_words_of_tokens_that_the_model_lacks(tiny_model: Path, tmp_path: Path, write_model: Any) -> None:
    """Its tokenizer has more than it: such words never come up, and ban nothing."""
    path = write_model(tmp_path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_tokens(["<more>"])
    backend.save(str(path / "tokenizer.json"))
    params = SamplingParams(temperature=0, max_tokens=4, bad_words=["<more>", "a<more>", "<more>a"])
    [plain, done] = (
        LLM(str(model), dtype="float32").generate([1, 2], p)[0].outputs[0]
        for model, p in ((tiny_model, SamplingParams(temperature=0, max_tokens=4)), (path, params))
    )
    assert done.token_ids == plain.token_ids
