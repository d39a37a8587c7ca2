"""Chunks: what of a request's output can be sent on."""

from __future__ import annotations

from bisect import bisect_right

from specinfer.engine.request import Request
from specinfer.outputs import StreamChunk


class Cursor:
    """How much of a request's output was sent on."""

    def __init__(self) -> None:
        self._num_chars = self._num_tokens = 0

    def is_behind(self, request: Request) -> bool:
        """Whether the request has tokens that were not sent."""
        return request.num_output_tokens > self._num_tokens

    def chunk(self, request: Request) -> StreamChunk:
        """What is certain of the output beyond what was sent before."""
        finished = request.finish_reason is not None
        end = len(request.detokenizer.text) if finished else request.detokenizer.safe_length()
        chunk = StreamChunk(
            text=request.detokenizer.text[self._num_chars : end],
            token_ids=tuple(request.tokens[request.num_prompt_tokens + self._num_tokens :]),
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs[self._num_tokens :]),
            pieces=pieces(request, self._num_chars, end),
            output=request.completion() if finished else None,
        )
        self._num_chars += len(chunk.text)
        self._num_tokens += len(chunk.token_ids)
        return chunk


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
