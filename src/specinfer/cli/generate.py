"""`specinfer generate`: one prompt, streamed, or a file of prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specinfer.cli import batch
from specinfer.cli.console import out, print_json, write_text
from specinfer.cli.options import EngineOptions, OutputOptions, SamplingOptions, takes_options
from specinfer.cli.records import completion_record, stats_line
from specinfer.cli.stream import stream_to
from specinfer.errors import ConfigError, RequestError
from specinfer.interrupt import Interrupted
from specinfer.outputs import CompletionOutput
from specinfer.sampling_params import SamplingParams

EXAMPLE = 'for example: specinfer generate "The sea is"'


@takes_options
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: Annotated[
        str | None,
        Argument(help="The text to continue; - or nothing reads it from stdin.", show_default=False),
    ] = None,
    input_path: Annotated[
        Path | None,
        Option(
            "--input",
            help='JSON lines, each with "prompt", "messages" or "prompt_token_ids", and an "id" if wanted.',
            metavar="FILE",
        ),
    ] = None,
    output_path: Annotated[
        Path | None,
        Option(
            "--output", help="Where results are appended; rows already in it are skipped.", metavar="FILE"
        ),
    ] = None,
    n: Annotated[int, Option("--n", help="Samples of each prompt.")] = 1,
    max_num_seqs: Annotated[int, Option("--max-num-seqs", help="Requests that run at once.")] = 16,
) -> None:
    """Continue a prompt, or every prompt of a file.

    The text goes to stdout, statistics to stderr. A run over a file that was interrupted goes on where it
    stopped when the same command is given again.
    """
    output.start()
    engine.check()
    params = sampling.params(n=n)
    if max_num_seqs < 1:
        raise ConfigError(f"--max-num-seqs must be a positive integer, got {max_num_seqs}")
    if input_path is not None:
        if prompt is not None:
            raise ConfigError("give a prompt or --input, not both", hint=EXAMPLE)
        if output_path is None:
            batch.to_stdout(engine, params, output, input_path, max_num_seqs)
        else:
            batch.to_file(engine, params, output, input_path, output_path, max_num_seqs)
        return
    if output_path is not None:
        raise ConfigError("--output goes with --input", hint="redirect stdout to keep the text of one prompt")
    one(engine, params, output, read_prompt(prompt), max_num_seqs)


def read_prompt(argument: str | None) -> str:
    """The prompt, from stdin where the command line has none."""
    if argument is None and sys.stdin.isatty():
        raise RequestError("there is no prompt", hint=EXAMPLE)
    try:
        if argument is None or argument == "-":
            argument = sys.stdin.read().removesuffix("\n")
        argument.encode()  # other bytes come from the command line as lone surrogates
    except UnicodeError:
        raise RequestError("the prompt is not UTF-8", hint="convert it, for example with iconv") from None
    if not argument:
        raise RequestError("the prompt is empty", hint=EXAMPLE)
    return argument


def one(
    engine: EngineOptions, params: SamplingParams, output: OutputOptions, prompt: str, max_num_seqs: int
) -> None:
    """Generate for one prompt and print."""
    llm = engine.load(min(params.n, max_num_seqs))
    prompt_token_ids = llm.tokenizer.encode(prompt)
    console = out()
    outputs: list[CompletionOutput]
    if params.n == 1:
        streamed = stream_to(None if output.as_json else console, llm, prompt, params)
        if not output.as_json:
            write_text(console, "\n")
        if streamed.output is None:
            raise Interrupted()
        outputs = [streamed.output]
    else:
        outputs = list(llm.generate(prompt, params, progress=not output.quiet)[0].outputs)
        for sample in () if output.as_json else outputs:
            write_text(console, f"--- sample {sample.index} ---\n", "bold")
            write_text(console, f"{sample.text}\n")
    if output.as_json:
        samples = [completion_record(sample) for sample in outputs]
        print_json({"prompt": prompt, "prompt_token_ids": prompt_token_ids, "outputs": samples})
    for sample in outputs:
        output.note(stats_line(sample))
