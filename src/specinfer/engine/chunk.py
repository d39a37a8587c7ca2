"""Chunks: what of a request's output can be sent on."""

from __future__ import annotations

from bisect import bisect_right

from specinfer.engine.request import Request
from specinfer.outputs import StreamChunk


def stream_chunk(request: Request, num_chars: int, num_tokens: int) -> StreamChunk:
    """What is certain of the output beyond the characters and tokens that were sent before."""
    finished = request.finish_reason is not None
    end = len(request.detokenizer.text) if finished else request.detokenizer.safe_length()
    return StreamChunk(
        text=request.detokenizer.text[num_chars:end],
        token_ids=tuple(request.tokens[request.num_prompt_tokens + num_tokens :]),
        logprobs=None if request.params.logprobs is None else tuple(request.logprobs[num_tokens:]),
        pieces=pieces(request, num_chars, end),
        output=request.completion() if finished else None,
    )


def pieces(request: Request, start: int, end: int) -> tuple[tuple[str, bool], ...]:
    """text[start:end] cut where accepted draft tokens and the target's own meet."""
    runs: list[tuple[str, bool]] = []
    ends = request.detokenizer.ends
    first = bisect_right(ends, start)  # a chunk must not cost what the whole output is long
    text_start = start
    for text_end, accepted in zip(ends[first:], request.is_accepted[first:], strict=True):
        part = request.detokenizer.text[text_start : min(end, text_end)]
        text_start = text_end
        if part and runs and runs[-1][1] == accepted:
            runs[-1] = (runs[-1][0] + part, accepted)
        elif part:
            runs.append((part, accepted))
    rest = request.detokenizer.text[text_start:end]
    return (*runs, (rest, False)) if rest else tuple(runs)
