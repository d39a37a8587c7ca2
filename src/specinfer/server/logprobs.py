"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from specinfer.models.tokenizer import Tokenizer
from specinfer.outputs import Logprob, TokenLogprobs
from specinfer.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""What stands for minus infinity, which JSON can't write."""
BYTES = re.compile(r"(<0x[0-9A-F]{2}>)+")


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
    start: int,
) -> CompletionLogprobs:
    """Of tokens whose text begins at character `start`; None where nothing precedes a token."""
    texts = [tokenizer.token_text(token) for token in token_ids]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[
            None if scores is None else max(scores[token].logprob, LOWEST)
            for token, scores in zip(token_ids, logprobs, strict=True)
        ],
        top_logprobs=[
            None
            if scores is None
            else {
                tokenizer.token_text(other): max(score.logprob, LOWEST)
                for other, score in by_rank(scores)
                if other == token or score.rank <= num_top
            }
            for token, scores in zip(token_ids, logprobs, strict=True)
        ],
        text_offset=list(accumulate(map(len, texts[:-1]), initial=start)) if texts else [],
    )


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """Of the tokens of an answer, or of a part of one."""

    def top(token: int, logprob: float) -> TopLogprob:
        text = tokenizer.token_text(token)
        return TopLogprob(token=text, logprob=max(logprob, LOWEST), bytes=token_bytes(text))

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **top(token, scores[token].logprob).model_dump(),
                top_logprobs=[top(t, s.logprob) for t, s in by_rank(scores) if s.rank <= num_top],
            )
            for token, scores in zip(token_ids, logprobs, strict=True)
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's shape: per prompt token, by token id."""
    return [
        None
        if scores is None
        else {
            str(token): PromptLogprob(
                logprob=max(score.logprob, LOWEST), rank=score.rank, decoded_token=tokenizer.token_text(token)
            )
            for token, score in scores.items()
        }
        for scores in logprobs
    ]


def by_rank(scores: TokenLogprobs) -> list[tuple[int, Logprob]]:
    """The likeliest first."""
    return sorted(scores.items(), key=lambda item: item[1].rank)


def token_bytes(text: str) -> list[int]:
    """The bytes of a token as `Tokenizer.token_text` writes it, which may be part of a character."""
    if BYTES.fullmatch(text):
        return [int(text[i + 3 : i + 5], 16) for i in range(0, len(text), 6)]
    return list(text.encode())
