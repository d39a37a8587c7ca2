"""The `specinfer` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from specinfer.cli.chat import chat
from specinfer.cli.console import log_to_stderr, note, print_error
from specinfer.cli.demo import demo
from specinfer.cli.distill import distill, judge
from specinfer.cli.generate import generate
from specinfer.cli.serve import serve
from specinfer.cli.tree import tree
from specinfer.errors import ConfigError, RequestError, SpecinferError
from specinfer.interrupt import Interrupted

FAILURE, USAGE, INTERRUPT = 1, 2, 130

app = typer.Typer(
    name="specinfer",
    help="Language models faster, and unchanged, by tree-based speculative inference.",
    add_completion=False,
    rich_markup_mode="markdown",  # paragraphs of docstrings are filled
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (demo, generate, chat, serve, tree, distill, judge):
    app.command()(command)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        try:
            number = version("specinfer")
        except PackageNotFoundError:  # run from a checkout that is not installed
            number = "unknown"
        print(f"specinfer {number}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def specinfer(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, that of the process unless given. Returns the exit code: 0, 1 failure, 2 usage,
    130 Ctrl-C."""
    with log_to_stderr():
        code = run(sys.argv[1:] if arguments is None else list(arguments))
    return code if flush() else code or FAILURE


def run(arguments: list[str]) -> int:
    """Run a command line; what a person can act on becomes an error and a hint, without a traceback."""
    try:
        code = app(arguments, prog_name="specinfer", standalone_mode=False)
    except SpecinferError as error:
        print_error(error.message, error.hint)
        return USAGE if isinstance(error, ConfigError | RequestError) else FAILURE
    except Interrupted as interrupt:
        note(interrupt.message)
        return INTERRUPT
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPT
    except BrokenPipeError:
        return FAILURE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}", None)
        return FAILURE
    except SystemExit as leave:  # a closed pipe, met by rich or typer
        code = leave.code
    except typer.TyperException as error:
        print_error(" ".join(error.format_message().split()), f"see: {usage_command(error)} --help")
        return USAGE
    if code == INTERRUPT:  # typer turns Ctrl-C into this code
        note("interrupted")
    return code if isinstance(code, int) else 0


def usage_command(error: typer.TyperException) -> str:
    """The command that was typed wrongly."""
    return str(getattr(getattr(error, "ctx", None), "command_path", "specinfer"))


def flush() -> bool:
    """Whether all of stdout got out; what a closed pipe left is dropped, or Python would complain at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
