"""A file of prompts to a file of results, which survives being interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specinfer.cli.console import err, print_json
from specinfer.cli.options import EngineOptions, OutputOptions
from specinfer.cli.records import completion_record, count
from specinfer.cli.results import ResultFile
from specinfer.cli.rows import InputRow, read_rows
from specinfer.errors import ConfigError, RequestError
from specinfer.interrupt import Interrupted, catch_interrupt
from specinfer.outputs import CompletionOutput, acceptance_length
from specinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specinfer.engine.request import Request
    from specinfer.llm import LLM

QUEUED_PER_SEQ = 4
Sink = Callable[[InputRow, Sequence[CompletionOutput]], None]


def to_stdout(
    engine: EngineOptions, params: SamplingParams, output: OutputOptions, input_path: Path, max_num_seqs: int
) -> None:
    """Print one line of JSON per row as it finishes."""
    rows = read_rows(input_path)
    llm = engine.load(max_num_seqs)
    check(llm, rows, params)
    num_done = finish(
        llm, rows, params, max_num_seqs, output.quiet, lambda *done: print_json(result_record(*done))
    )
    if num_done < len(rows):
        raise Interrupted(f"interrupted: {num_done} of {count(len(rows), 'row')} done")


def to_file(
    engine: EngineOptions,
    params: SamplingParams,
    output: OutputOptions,
    input_path: Path,
    output_path: Path,
    max_num_seqs: int,
) -> None:
    """Generate for the rows that have no result in the file yet."""
    rows = read_rows(input_path)
    if output_path.exists() and output_path.samefile(input_path):
        raise ConfigError("--input and --output are the same file", hint="name another --output")
    results = ResultFile(output_path, rows)
    num_skipped = len(results.done)
    left = [row for row in rows if row.index not in results.done]
    written: list[CompletionOutput] = []

    def write(row: InputRow, outputs: Sequence[CompletionOutput]) -> None:
        results.append(result_record(row, outputs))
        written.extend(outputs)

    seconds = 0.0
    if left:
        llm = engine.load(max_num_seqs)
        check(llm, left, params)
        start = time.perf_counter()
        with results:
            finish(llm, left, params, max_num_seqs, output.quiet, write)
        seconds = time.perf_counter() - start
    if len(results.done) < len(rows):
        raise Interrupted(
            f"interrupted: {len(results.done)} of {count(len(rows), 'row')} are in {output_path}; "
            "the same command resumes"
        )
    num_tokens = sum(len(o.token_ids) for o in written)
    if output.as_json:
        print_json(
            {
                "output": str(output_path),
                "num_rows": len(rows),
                "num_skipped": num_skipped,
                "num_output_tokens": num_tokens,
                "seconds": seconds,
                "acceptance_length": acceptance_length(o.stats for o in written),
            }
        )
    before = f" ({num_skipped} of them before)" if num_skipped else ""
    speed = f", {count(num_tokens, 'token')} at {num_tokens / seconds:.1f} tokens/s" if left else ""
    output.note(f"{count(len(rows), 'row')} done{before}{speed}: {output_path}")


def check(llm: LLM, rows: Sequence[InputRow], params: SamplingParams) -> None:
    """Raise RequestError for the first row that cannot be served, before any is."""
    for row in rows:
        try:
            llm.engine.check(row.token_ids(llm), params)
        except RequestError as error:
            raise RequestError(f"{row.where}: {error.message}", hint=error.hint) from None


def finish(
    llm: LLM,
    rows: Sequence[InputRow],
    params: SamplingParams,
    max_num_seqs: int,
    quiet: bool,
    sink: Sink,
) -> int:
    """Generate for all rows; each goes to `sink` when it is done. Returns how many: fewer after Ctrl-C."""
    console = err()
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    num_done = 0
    with (
        catch_interrupt() as interrupt,
        closing(finished_rows(llm, rows, params, QUEUED_PER_SEQ * max_num_seqs)) as steps,
        Progress(*columns, console=console, transient=True, disable=hidden) as bar,
    ):
        task = bar.add_task("", total=len(rows))
        for finished in steps:
            for row, requests in finished:
                sink(row, [request.completion() for request in requests])
            num_done += len(finished)
            bar.advance(task, len(finished))
            if interrupt.is_set:
                break
    return num_done


def finished_rows(
    llm: LLM, rows: Sequence[InputRow], params: SamplingParams, max_queued: int
) -> Generator[list[tuple[InputRow, list[Request]]]]:
    """[per step] the rows that it finished. Closing the generator aborts what is left.

    max_queued: requests that are in the engine at a time, waiting or running.
    """
    waiting = list(reversed(rows))
    running: dict[int, tuple[InputRow, list[Request]]] = {}
    try:
        while waiting or running:
            while waiting and (not running or (len(running) + 1) * params.n <= max_queued):
                row = waiting.pop()
                running[row.index] = (row, llm.engine.add_request(row.token_ids(llm), params))
            llm.engine.step()
            finished = [
                (row, requests)
                for row, requests in running.values()
                if all(r.finish_reason is not None for r in requests)
            ]
            for row, _ in finished:
                del running[row.index]
            yield finished
    finally:
        for _, requests in running.values():
            for request in requests:
                llm.engine.abort(request)


def result_record(row: InputRow, outputs: Sequence[CompletionOutput]) -> dict[str, object]:
    """One line of the results: the sample itself, or all of them where several were asked for."""
    head: dict[str, object] = {"index": row.index, "id": row.id}
    samples = [completion_record(output) for output in outputs]
    if len(samples) > 1:
        return {**head, "outputs": samples}
    return {**head, **{key: value for key, value in samples[0].items() if key != "index"}}
