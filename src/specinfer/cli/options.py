"""The options that commands share. Each stands for a field of EngineConfig or SamplingParams."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from specinfer.cli.console import note
from specinfer.config import AUTO_TREE, DEFAULT_TREE, DType, EngineConfig, Quantize
from specinfer.errors import ConfigError, RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.tree import parse_topology

if TYPE_CHECKING:
    from specinfer.llm import LLM

MODEL = "smollm2-135m"
NO_DRAFT = "none"
NOT_MODELS = (NO_DRAFT, "default", "ngram")
"""What --draft may name beside models."""
FORMS = {"json_schema": "json", "regex": "regex"}
"""Options that give a field of `structured_outputs`."""


def option(*names: str, help: str, panel: str, **settings: Any) -> Any:
    """An option in a panel of --help."""
    return Option(*names, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What is loaded."""

    model: Annotated[
        str,
        option(
            "--model",
            "-m",
            help="Built-in name, directory, .gguf file or hub name.",
            panel="Model",
            metavar="NAME",
        ),
    ] = MODEL
    draft: Annotated[
        list[str] | None,
        option(
            "--draft",
            "-d",
            help="Draft model, 'ngram', or 'none' for plain decoding; repeat it to merge several. "
            "A built-in model has its own: 'features', which is its 'default', and 'tokens'. Unless given: "
            "'ngram', merged with 'default' for a built-in model.",
            panel="Model",
            metavar="NAME",
        ),
    ] = None
    tree: Annotated[
        str,
        option(
            "--tree",
            help="Widths of the token tree by depth, as in 3,2,1,1; auto: by measured cost, down to none.",
            panel="Model",
        ),
    ] = DEFAULT_TREE
    verifier: Annotated[
        str,
        option(
            "--verifier", help="coupled, multi_step or without_replacement.", panel="Model", metavar="NAME"
        ),
    ] = "coupled"
    dtype: Annotated[DType, option("--dtype", help="What weights and K/V are kept in.", panel="Model")] = (
        "auto"
    )
    quantize: Annotated[
        Quantize | None, option("--quantize", help="Keep the target's weights in 8 bits.", panel="Model")
    ] = None
    device: Annotated[
        str, option("--device", help="auto is cuda where there is one.", panel="Model", metavar="NAME")
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        option("--max-model-len", help="Longest prompt and output together, in tokens.", panel="Model"),
    ] = None
    kv_memory: Annotated[
        int | None, option("--kv-memory", help="Bytes of K/V for target and drafts.", panel="Model")
    ] = None

    def check(self) -> None:
        """Raise ConfigError or ModelError for what is wrong without a look into any model."""
        if self.draft and NO_DRAFT in self.draft and len(self.draft) > 1:
            raise ConfigError("--draft none goes with no other draft", hint="leave one of them out")
        if self.tree != AUTO_TREE:
            parse_topology(self.tree)
        EngineConfig(model=self.model, max_model_len=self.max_model_len, kv_memory=self.kv_memory)
        from specinfer.models.catalog import BUILT_IN, path_on_disk

        shipped = BUILT_IN[self.model].drafts if self.model in BUILT_IN else ()
        for name in (self.model, *(self.draft or ())):
            if name not in (*BUILT_IN, *NOT_MODELS, *shipped):
                path_on_disk(name)

    def drafts(self) -> tuple[str, ...]:
        """The drafts meant: with none named prompt lookup, which any model can have, merged with the one that
        ships for the model."""
        if self.draft:
            return () if self.draft == [NO_DRAFT] else tuple(self.draft)
        from specinfer.models.catalog import BUILT_IN

        has_own = self.model in BUILT_IN and BUILT_IN[self.model].drafts
        return ("default", "ngram") if has_own else ("ngram",)

    def config(self, max_num_seqs: int) -> EngineConfig:
        """The config meant."""
        own = {f.name: getattr(self, f.name) for f in fields(EngineOptions) if f.name != "draft"}
        return EngineConfig(drafts=self.drafts(), max_num_seqs=max_num_seqs, **own)

    def load(self, max_num_seqs: int, *, is_plain: bool = False) -> LLM:
        """Load the target with its drafts, or without any."""
        from specinfer.llm import LLM

        config = self.config(max_num_seqs)
        return LLM(**vars(replace(config, drafts=()) if is_plain else config))


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, and when a text ends."""

    temperature: Annotated[
        float, option("--temperature", help="0 always takes the likeliest token.", panel="Sampling")
    ] = 0.0
    top_k: Annotated[
        int, option("--top-k", help="Keep the k likeliest tokens; 0: all.", panel="Sampling")
    ] = 0
    top_p: Annotated[
        float,
        option("--top-p", help="Keep the likeliest tokens that reach this probability.", panel="Sampling"),
    ] = 1.0
    min_p: Annotated[
        float,
        option("--min-p", help="Drop tokens less likely than this times the likeliest.", panel="Sampling"),
    ] = 0.0
    typical_p: Annotated[
        float,
        option(
            "--typical-p", help="Keep the most typical tokens that reach this probability.", panel="Sampling"
        ),
    ] = 1.0
    repetition_penalty: Annotated[
        float,
        option(
            "--repetition-penalty",
            help="Above 1 disfavours tokens that occurred, in the prompt too.",
            panel="Sampling",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        option("--presence-penalty", help="Taken off the logit of a token in the output.", panel="Sampling"),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option("--frequency-penalty", help="The same, for each time that it occurs.", panel="Sampling"),
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(
            "--logit-bias",
            help="Added to a token's logit, -inf bans it; may be repeated.",
            panel="Sampling",
            metavar="ID=BIAS",
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        option(
            "--allowed-token-ids",
            help="Allow this token and no others; may be repeated.",
            panel="Sampling",
            metavar="ID",
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        option("--bad-words", help="Never write this; may be repeated.", panel="Sampling", metavar="TEXT"),
    ] = None
    json_schema: Annotated[
        Path | None,
        option("--json-schema", help="Write JSON of this schema.", panel="Sampling", metavar="FILE"),
    ] = None
    regex: Annotated[
        str | None,
        option("--regex", help="Write what this matches.", panel="Sampling", metavar="TEXT"),
    ] = None
    seed: Annotated[
        int | None, option("--seed", help="Same seed, same text. Fresh unless given.", panel="Sampling")
    ] = None
    max_tokens: Annotated[
        int | None,
        option("--max-tokens", help="Longest output. 128 unless given; in chat 1024.", panel="Sampling"),
    ] = None
    min_tokens: Annotated[
        int, option("--min-tokens", help="No end before this many tokens.", panel="Sampling")
    ] = 0
    ignore_eos: Annotated[
        bool, option("--ignore-eos", help="Go on past the model's end token.", panel="Sampling")
    ] = False
    stop: Annotated[
        list[str] | None,
        option("--stop", help="End at this string; may be repeated.", panel="Sampling", metavar="TEXT"),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        option(
            "--stop-token-ids", help="End at this token; may be repeated.", panel="Sampling", metavar="ID"
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, option("--include-stop-str-in-output", help="Keep what the text ended at.", panel="Sampling")
    ] = False
    skip_special_tokens: Annotated[
        bool,
        option(
            "--skip-special-tokens/--show-special-tokens",
            help="Leave special tokens out of the text.",
            panel="Sampling",
        ),
    ] = True
    logprobs: Annotated[
        int | None,
        option(
            "--logprobs",
            help="With --json: log probabilities, and those of the k likeliest.",
            panel="Sampling",
            metavar="K",
        ),
    ] = None

    def params(self, *, max_tokens: int = 128, **others: Any) -> SamplingParams:
        """max_tokens: where none was asked for. Raises RequestError."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = parse_biases(self.logit_bias)
        form = {name: given.pop(field) for field, name in FORMS.items() if field in given}
        if form:
            if "json" in form:
                form = {**form, "json": read_text(form["json"]), "disable_any_whitespace": True}
            given["structured_outputs"] = form
        return SamplingParams(**{"max_tokens": max_tokens, **given, **others})


def read_text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", hint="name a file that holds a JSON schema"
        ) from None


def parse_biases(texts: Sequence[str]) -> dict[str, float]:
    """Token id -> bias of options like 42=-1.5. Raises RequestError."""
    biases: dict[str, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise RequestError(f"--logit-bias {text!r} is not ID=BIAS", hint="for example 42=-1.5") from None
    return biases


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is printed besides the result."""

    as_json: Annotated[
        bool, option("--json", help="Print JSON, and nothing else, to stdout.", panel="Output")
    ] = False
    quiet: Annotated[
        bool, option("--quiet", "-q", help="No statistics and no progress bar.", panel="Output")
    ] = False
    verbose: Annotated[
        bool, option("--verbose", "-v", help="Log to stderr, the memory table included.", panel="Output")
    ] = False

    def start(self) -> None:
        """Set the level of the log, which `main` has directed to stderr."""
        if self.verbose:
            logging.getLogger("specinfer").setLevel(logging.INFO)

    def note(self, text: str) -> None:
        """A line on stderr, unless --quiet."""
        if not self.quiet:
            note(text)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer the fields of a command's dataclass parameters as options of the command itself."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
            continue
        annotations = get_type_hints(groups[name], include_extras=True)
        parameters.extend(
            inspect.Parameter(
                f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=annotations[f.name]
            )
            for f in fields(groups[name])
        )

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run
