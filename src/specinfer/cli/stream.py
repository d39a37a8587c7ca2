"""Printing a text while it is generated."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, cast

from rich.console import Console

from specinfer.cli.console import ACCEPTED_STYLE, write_text
from specinfer.interrupt import catch_interrupt
from specinfer.outputs import CompletionOutput
from specinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specinfer.llm import LLM, Prompt


class Streamed(NamedTuple):
    """text: what was generated. output: None if Ctrl-C stopped it."""

    text: str
    output: CompletionOutput | None


def stream_to(console: Console | None, llm: LLM, prompt: Prompt, params: SamplingParams) -> Streamed:
    """Generate one sample; its text goes to `console` as it comes, accepted draft tokens coloured.

    Ctrl-C ends it between two steps, its slots free.
    """
    chunks = llm.stream(prompt, params)
    texts: list[str] = []
    with catch_interrupt() as interrupt, closing(chunks):
        for chunk in chunks:
            texts.append(chunk.text)
            for text, is_accepted in chunk.pieces if console is not None else ():
                write_text(cast(Console, console), text, ACCEPTED_STYLE if is_accepted else "")
            if chunk.output is not None:
                return Streamed("".join(texts), chunk.output)
            if interrupt.is_set:
                break
    return Streamed("".join(texts), None)
