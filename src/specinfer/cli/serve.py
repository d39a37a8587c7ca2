"""`specinfer serve`: a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument

from specinfer.cli.console import note
from specinfer.cli.options import MODEL, EngineOptions, OutputOptions, option, takes_options
from specinfer.errors import ConfigError

KEYS_VARIABLE = "SPECINFER_API_KEYS"
EXTRAS = {
    "server": ("fastapi", "uvicorn", "pydantic", "prometheus_client"),
    "grpc": ("grpc", "google.protobuf"),
}


@dataclass(frozen=True, kw_only=True)
class ServedOptions(EngineOptions):
    """What is loaded; the model is the argument."""

    model: Annotated[str, Argument(help="Built-in name, directory, .gguf file or hub name.")] = MODEL


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much is taken at once."""

    max_num_seqs: Annotated[
        int, option("--max-num-seqs", help="Requests that run at once.", panel="Load")
    ] = 16
    max_step_tokens: Annotated[
        int, option("--max-step-tokens", help="Prompt tokens computed per step.", panel="Load")
    ] = 256
    max_queue: Annotated[
        int, option("--max-queue", help="Requests that may wait; more are answered 429.", panel="Load")
    ] = 256
    prefix_cache: Annotated[
        bool,
        option(
            "--prefix-cache/--no-prefix-cache", help="Keep K/V for prompts that begin alike.", panel="Load"
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and to whom."""

    model_name: Annotated[
        str | None,
        option(
            "--model-name",
            help="What requests call the model. MODEL unless given.",
            panel="Server",
            metavar="NAME",
        ),
    ] = None
    host: Annotated[
        str,
        option("--host", help="Address to serve on; 0.0.0.0 is every one.", panel="Server", metavar="HOST"),
    ] = "127.0.0.1"
    port: Annotated[int, option("--port", help="0 takes a free one.", panel="Server")] = 8000
    grpc_port: Annotated[
        int | None, option("--grpc-port", help="Serve gRPC, too; 0 takes a free port.", panel="Server")
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            "--api-key-file",
            help=f"Keys, one a line, of which a request must have one; more: {KEYS_VARIABLE}, with commas.",
            panel="Server",
            metavar="FILE",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        option(
            "--cors-origin",
            help="Let pages of this origin call the server; may be repeated.",
            panel="Server",
            metavar="ORIGIN",
        ),
    ] = None
    max_body_bytes: Annotated[
        int, option("--max-body-bytes", help="Largest request body.", panel="Server")
    ] = 4 * 2**20
    read_timeout: Annotated[
        float, option("--read-timeout", help="Seconds to send a head in, and a body.", panel="Server")
    ] = 30.0
    request_timeout: Annotated[
        float, option("--request-timeout", help="Seconds that a request may take.", panel="Server")
    ] = 600.0
    drain_timeout: Annotated[
        float, option("--drain-timeout", help="Seconds to finish in after SIGTERM.", panel="Server")
    ] = 60.0
    log_prompts: Annotated[
        bool, option("--log-prompts", help="Let --verbose log prompts.", panel="Server")
    ] = False


@takes_options
def serve(
    engine: ServedOptions,
    load: LoadOptions,
    server: ServerOptions,
    verbose: Annotated[
        bool, option("--verbose", "-v", help="Log requests to stderr.", panel="Output")
    ] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it, and over gRPC.

    SIGTERM or Ctrl-C lets running requests finish; a second one does not wait.
    """
    OutputOptions(verbose=verbose).start()
    engine.check()
    check_extra("server")
    if server.grpc_port is not None:
        check_extra("grpc")
    run(engine, load, server)


def run(engine: ServedOptions, load: LoadOptions, server: ServerOptions) -> None:
    """Bind, load, serve: what is wrong with the port shows before a model is read."""
    from specinfer.engine.async_engine import AsyncEngine
    from specinfer.server.config import ServerConfig
    from specinfer.server.serve import Ready, bind
    from specinfer.server.serve import serve as serve_until_told

    if load.max_queue < 0:
        raise ConfigError(f"--max-queue must be 0 or more, got {load.max_queue}")
    config = ServerConfig(
        model_name=server.model_name or engine.model,
        host=server.host,
        port=server.port,
        grpc_port=server.grpc_port,
        api_keys=api_keys(server.api_key_file),
        cors_origins=tuple(server.cors_origin or ()),
        max_body_bytes=server.max_body_bytes,
        read_timeout=server.read_timeout,
        request_timeout=server.request_timeout,
        drain_timeout=server.drain_timeout,
        log_prompts=server.log_prompts,
    )
    engine_config = replace(
        engine.config(load.max_num_seqs),
        max_step_tokens=load.max_step_tokens,
        prefix_cache=load.prefix_cache,
    )
    with bind(config.host, config.port) as listener:
        front = AsyncEngine.build(engine_config, max_queue=load.max_queue)

        def tell(ready: Ready) -> None:
            with suppress(OSError):  # a log that is full stops nobody
                note(f"{config.model_name}: serving on http://{config.address(ready.port)}")
                if ready.grpc_port is not None:
                    note(f"{config.model_name}: serving gRPC on {config.address(ready.grpc_port)}")

        asyncio.run(serve_until_told(front, config, listener, tell))


def api_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of the file, one a line, and those of the environment. A file without is an error."""
    lines = os.environ.get(KEYS_VARIABLE, "").split(",")
    if path is not None:
        found = [line.strip() for line in path.read_text().splitlines()]
        if not any(found):
            raise ConfigError(f"{path} holds no API key", hint="write one key a line")
        lines += found
    return tuple(key for line in lines if (key := line.strip()))


def check_extra(extra: str) -> None:
    """Raise ConfigError unless what an optional part needs is installed."""
    missing = [name for name in EXTRAS[extra] if not is_installed(name)]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed", hint=f"pip install 'specinfer[{extra}]'")


def is_installed(name: str) -> bool:
    """Whether a module can be found, its packages included."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
