"""A request's parameters where they meet the model's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specinfer.errors import RequestError
from specinfer.models.tokenizer import Tokenizer
from specinfer.sampling_params import SamplingParams


def check_tokens(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Sequence[int]
) -> None:
    """Raise RequestError for a token that does not exist, for text without a tokenizer, and for parameters
    that may leave no token to choose from."""
    for name, ids in (
        ("logit_bias", params.biases),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        wrong = next((token for token in ids if token >= vocab_size), None)
        if wrong is not None:
            raise RequestError(f"{name} names token {wrong}: ids must be in [0, {vocab_size - 1}]")
    if params.stop_strings and tokenizer is None:
        raise RequestError("stop strings need a tokenizer", hint="use stop_token_ids")
    banned = {token for token, bias in params.biases.items() if bias == -math.inf}
    banned.update(word[-1] for word in bad_word_tokens(params, tokenizer))
    if params.min_tokens:
        banned.update(end_tokens(params, end_token_ids))
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if banned and banned.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids, logit_bias, bad_words and min_tokens together may leave no token to choose",
            hint="allow a token that none of the others bans",
        )


def end_tokens(params: SamplingParams, of_model: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end a request: the model's, unless ignored, and its own."""
    return (*(() if params.ignore_eos else of_model), *params.stop_token_ids)


def bad_word_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each of `bad_words` as the tokenizer writes it at a start, within a text and after a space.

    Raises RequestError.
    """
    if params.bad_words and tokenizer is None:
        raise RequestError("bad_words need a tokenizer", hint="use logit_bias of -inf")
    words: list[list[int]] = []
    for word in params.bad_words:
        assert tokenizer is not None
        texts = ("\n", word, f"\n{word}", f" {word}")
        line, plain, inner, spaced = (tokenizer.encode(text, False) for text in texts)
        if not plain:
            raise RequestError(f"bad_words holds {word!r}, which has no tokens", hint="leave it out")
        words.append(plain)
        # SentencePiece reads a text as if a space came first: it writes a word otherwise after a line's end.
        if inner[: len(line)] == line and inner[len(line) :] not in ([], plain):
            words.append(inner[len(line) :])
        if spaced[-len(plain) :] != plain:  # else the one bans the other
            words.append(spaced)
    return words
