"""`specinfer chat`: a conversation."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from specinfer.cli.console import note, out, print_json, write_text
from specinfer.cli.options import EngineOptions, OutputOptions, SamplingOptions, takes_options
from specinfer.cli.records import completion_record, count, stats_line, tokens_per_second
from specinfer.cli.stream import stream_to
from specinfer.errors import RequestError
from specinfer.outputs import CompletionOutput, acceptance_length
from specinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specinfer.llm import LLM

MAX_TOKENS = 1024
PROMPT = "> "
COMMANDS = "/reset forgets the conversation, /stats shows speed and acceptance, /exit leaves"


@takes_options
def chat(engine: EngineOptions, sampling: SamplingOptions, output: OutputOptions) -> None:
    """Talk with the model, one line a turn.

    /reset forgets the conversation, /stats shows speed and acceptance, /exit or Ctrl-D leaves; Ctrl-C stops
    an answer. From a pipe, each line is a turn.
    """
    output.start()
    engine.check()
    params = sampling.params(max_tokens=MAX_TOKENS)
    llm = engine.load(1)
    llm.tokenizer.apply_chat_template([{"role": "user", "content": "?"}])  # or there is nothing to talk to
    conversation = Conversation(llm, params, output)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        output.note(f"{engine.model}; {COMMANDS}")
    while (line := read_line(is_interactive)) is not None:
        words = line.strip()
        if words == "/exit":
            return
        if words == "/reset":
            conversation.reset()
        elif words == "/stats":
            note(conversation.stats())
        elif words.startswith("/") and words[1:].isalpha():
            note(f"{words} is not a command: {COMMANDS}")
        elif words:
            conversation.ask(line)


def read_line(is_interactive: bool) -> str | None:
    """The next line; None at the end of the input. Ctrl-C while typing drops the line."""
    if not is_interactive:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise RequestError(
                "what comes from stdin is not UTF-8", hint="convert it, for example with iconv"
            ) from None
        return line.removesuffix("\n") if line else None
    import readline  # noqa: F401 - input() then has editing and a history

    while True:
        try:
            return input(PROMPT)
        except EOFError:
            write_text(out(), "\n")
            return None
        except KeyboardInterrupt:
            note("\nCtrl-D or /exit leaves")


class Conversation:
    """The turns so far, and what they cost."""

    def __init__(self, llm: LLM, params: SamplingParams, output: OutputOptions) -> None:
        self._llm = llm
        self._params = params
        self._output = output
        self._messages: list[dict[str, str]] = []
        self._answers: list[CompletionOutput] = []
        self._num_tokens = 0

    def reset(self) -> None:
        """Forget the turns."""
        self._messages.clear()
        self._num_tokens = 0
        note("the conversation is empty again")

    def ask(self, line: str) -> None:
        """One turn: the person's line, and the answer as it is generated."""
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            prompt = self._llm.tokenizer.apply_chat_template(messages)
        except RequestError as error:  # this line's fault, not the conversation's
            note(f"error: {error.message}")
            return
        room = self._llm.engine.max_model_len - len(prompt)
        if room < 1:
            note(
                f"the context of {self._llm.engine.max_model_len} tokens is full "
                f"({len(prompt)} with this line); /reset starts a new conversation"
            )
            return
        params = replace(self._params, max_tokens=min(self._params.max_tokens, room))
        console = None if self._output.as_json else out()
        streamed = stream_to(console, self._llm, prompt, params)
        if console is not None:
            write_text(console, "\n")
        if streamed.text or streamed.output is not None:
            self._messages = [*messages, {"role": "assistant", "content": streamed.text}]
        if streamed.output is None:
            note("stopped")
            return
        self._answers.append(streamed.output)
        self._num_tokens = len(prompt) + len(streamed.output.token_ids)
        if self._output.as_json:
            print_json({"turn": len(self._answers), "prompt": line, **completion_record(streamed.output)})
        self._say_why_it_ended(streamed.output, is_full=params.max_tokens == room)
        if sys.stdin.isatty():
            self._output.note(stats_line(streamed.output))

    def stats(self) -> str:
        """Over all answers."""
        if not self._answers:
            return "no answer yet"
        stats = [answer.stats for answer in self._answers]
        speed = tokens_per_second(stats)
        return ", ".join(
            [
                count(len(stats), "answer"),
                count(sum(s.num_output_tokens for s in stats), "token"),
                "-" if speed is None else f"{speed:.1f} tokens/s",
                f"acceptance length {acceptance_length(stats):.2f}",
                f"{self._num_tokens} of {self._llm.engine.max_model_len} tokens of the context used",
            ]
        )

    def _say_why_it_ended(self, answer: CompletionOutput, is_full: bool) -> None:
        if answer.finish_reason != "length":
            return
        if is_full:
            note("the context is full; /reset starts a new conversation")
        else:
            note(f"cut after {count(self._params.max_tokens, 'token')}; --max-tokens sets the limit")
