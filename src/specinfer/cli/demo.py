"""`specinfer demo`: the same texts without and with speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from typer import Exit

from specinfer.cli.console import QUIET_STYLE, err, out, print_json, write_text
from specinfer.cli.options import EngineOptions, OutputOptions, SamplingOptions, takes_options
from specinfer.cli.records import completion_record, tokens_per_second
from specinfer.cli.stream import stream_to
from specinfer.errors import ConfigError
from specinfer.interrupt import Interrupted
from specinfer.outputs import CompletionOutput, GenerationStats, acceptance_length
from specinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specinfer.llm import LLM

PROMPTS = {
    "prose": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "code": "Write a Python function that returns the n-th Fibonacci number, and show how to call it.",
    "arithmetic": "A baker sells 12 loaves a day at 3 dollars each. How much does she earn in 7 days? "
    "Explain step by step.",
}
WARM_UP_TOKENS = 8
SEED = 0


@dataclass(frozen=True)
class Comparison:
    """One prompt, generated twice."""

    kind: str
    prompt: str
    plain: CompletionOutput
    speculative: CompletionOutput

    @property
    def is_identical(self) -> bool:
        """Whether both have the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids


@takes_options
def demo(engine: EngineOptions, sampling: SamplingOptions, output: OutputOptions) -> None:
    """Generate three texts twice, without and with speculation, and compare speed and tokens.

    Tokens that a draft guessed and the target accepted are green. Exits with 1 if the texts differ.
    """
    output.start()
    engine.check()
    params = sampling.params(seed=SEED if sampling.seed is None else sampling.seed)
    drafts = engine.drafts()
    if not drafts:
        raise ConfigError(
            "the demo compares with and without a draft",
            hint="leave --draft none out",
        )
    plain = engine.load(1, is_plain=True)
    speculative = engine.load(1)
    warm_up = SamplingParams(temperature=0, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
    for llm in (plain, speculative):
        stream_to(None, llm, prompt_ids(llm, "Hello"), warm_up)
    console = None if output.as_json else out()
    comparisons = [
        compare(console, plain, speculative, kind, prompt, params) for kind, prompt in PROMPTS.items()
    ]
    if console is None:
        print_json(demo_record(comparisons, engine, drafts, params))
    else:
        console.print(table(comparisons))
        console.print(summary(comparisons), style="bold")
    # The other verifiers keep the distribution, not the draws: only greedy texts must then be equal.
    if engine.verifier != "coupled" and params.temperature > 0:
        err().out("with this verifier tokens may differ at a temperature above 0", style=QUIET_STYLE)
    elif not all(c.is_identical for c in comparisons):
        raise Exit(1)


def compare(
    console: Console | None, plain: LLM, speculative: LLM, kind: str, prompt: str, params: SamplingParams
) -> Comparison:
    """Generate for one prompt with both, one right after the other so that they meet the same machine."""
    outputs = []
    if console is not None:
        console.out(f"{kind}: {prompt}", style="bold")
    for llm, title in ((plain, "without speculation"), (speculative, "with speculation")):
        if console is not None:
            console.out(f"[{title}]", style=QUIET_STYLE)
        streamed = stream_to(console, llm, prompt_ids(llm, prompt), params)
        if streamed.output is None:
            raise Interrupted()
        outputs.append(streamed.output)
        if console is not None:
            write_text(console, "\n\n")
    return Comparison(kind, prompt, *outputs)


def prompt_ids(llm: LLM, text: str) -> list[int]:
    """A chat of one message."""
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def speeds(comparisons: list[Comparison]) -> tuple[float | None, float | None, float | None]:
    """Tokens per second without and with speculation, and their ratio; None where nothing was timed."""
    plain = tokens_per_second(c.plain.stats for c in comparisons)
    speculative = tokens_per_second(c.speculative.stats for c in comparisons)
    return plain, speculative, speculative / plain if plain and speculative else None


def speculative_stats(comparisons: list[Comparison]) -> list[GenerationStats]:
    """Of the runs with speculation."""
    return [c.speculative.stats for c in comparisons]


def table(comparisons: list[Comparison]) -> Table:
    """The result, a line per prompt and one for all of them."""
    result = Table(title="tokens per second", title_justify="left")
    result.add_column("prompt")
    for name in ("tokens", "plain", "speculative", "speedup", "acceptance length", "identical"):
        result.add_column(name, justify="right")
    for c in comparisons:
        result.add_row(c.kind, *cells([c]))
    result.add_section()
    result.add_row("all", *cells(comparisons))
    return result


def cells(comparisons: list[Comparison]) -> list[str]:
    """tokens, plain, speculative, speedup, acceptance length, identical."""
    plain, speculative, speedup = speeds(comparisons)
    return [
        str(sum(len(c.speculative.token_ids) for c in comparisons)),
        "-" if plain is None else f"{plain:.1f}",
        "-" if speculative is None else f"{speculative:.1f}",
        "-" if speedup is None else f"{speedup:.2f}x",
        f"{acceptance_length(speculative_stats(comparisons)):.2f}",
        "yes" if all(c.is_identical for c in comparisons) else "NO",
    ]


def summary(comparisons: list[Comparison]) -> str:
    """The last line."""
    speedup = speeds(comparisons)[2]
    num_identical = sum(c.is_identical for c in comparisons)
    tokens = (
        "all tokens identical"
        if num_identical == len(comparisons)
        else f"tokens identical in {num_identical} of {len(comparisons)} texts"
    )
    return tokens if speedup is None else f"{speedup:.2f} times as fast with speculation, {tokens}"


def demo_record(
    comparisons: list[Comparison], engine: EngineOptions, drafts: tuple[str, ...], params: SamplingParams
) -> dict[str, Any]:
    """JSON of everything."""
    return {
        "model": engine.model,
        "drafts": list(drafts),
        "tree": engine.tree,
        "verifier": engine.verifier,
        "temperature": params.temperature,
        "seed": params.seed,
        "prompts": [
            {
                "kind": c.kind,
                "prompt": c.prompt,
                **rates([c]),
                "plain": completion_record(c.plain),
                "speculative": completion_record(c.speculative),
            }
            for c in comparisons
        ],
        "all": rates(comparisons),
    }


def rates(comparisons: list[Comparison]) -> dict[str, Any]:
    """The numbers of one table line."""
    plain, speculative, speedup = speeds(comparisons)
    return {
        "num_tokens": sum(len(c.speculative.token_ids) for c in comparisons),
        "plain_tokens_per_second": plain,
        "speculative_tokens_per_second": speculative,
        "speedup": speedup,
        "acceptance_length": acceptance_length(speculative_stats(comparisons)),
        "is_identical": all(c.is_identical for c in comparisons),
    }
