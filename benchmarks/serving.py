"""The server under load: throughput, TTFT, TPOT and ITL, plain against speculation, beside the bare engine.

    python benchmarks/serving.py --prompts PATH/spec_bench.jsonl --out benchmarks/results/serving.json

One server runs all the while; per number of clients, each of three ways answers the same prompts: the server
with speculation, the server without (per request), and this process stepping an engine with speculation and
no server at all ("bare"), which keeps as many requests open. Clients send their next request when the last is
answered. Greedy, streamed. TTFT and TPOT are per request, as the client sees them; ITL is the time between
two events of a stream, each of one or more tokens. "overhead" is what the server lacks to the bare engine's
throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import random_model

from specinfer import LLM, SamplingParams

PERCENTILES = (50, 90, 99)
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent, when each event came, and the tokens it says it made."""

    sent: float
    events: list[float]
    num_tokens: int


async def ask(port: int, body: dict[str, Any]) -> Answer:
    """Stream one completion over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    )
    sent = time.perf_counter()
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    events, last = [], b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            events.append(time.perf_counter())
            last = line
    writer.close()
    usage = json.loads(last.removeprefix(b"data: ")).get("usage")
    if usage is None:
        raise SystemExit(f"the server answered {last.decode()}")
    return Answer(sent, events[:-1], usage["completion_tokens"])


async def load(
    port: int, prompts: Sequence[list[int]], num_clients: int, body: dict[str, Any]
) -> list[Answer]:
    """Every prompt answered once, by clients that wait for their answers."""
    left: Iterator[list[int]] = iter(prompts)

    async def client() -> list[Answer]:
        return [await ask(port, {**body, "prompt": prompt}) for prompt in left]

    clients = await asyncio.gather(*(client() for _ in range(num_clients)))
    return list(itertools.chain.from_iterable(clients))


def bare(llm: LLM, prompts: Sequence[list[int]], num_clients: int, params: SamplingParams) -> list[Answer]:
    """The same without a server: as many requests stay open, in one loop."""
    engine, left = llm.engine, list(reversed(prompts))
    running: dict[Any, list[float]] = {}
    answers = []
    while left or running:
        while left and len(running) < num_clients:
            running[engine.add_request(left.pop(), params)[0]] = []
        for emission in engine.step():
            running[emission.request].append(time.perf_counter())
        for request in [r for r in running if r.finish_reason is not None]:
            answers.append(Answer(request.arrival, running.pop(request), request.num_output_tokens))
    return answers


def row(way: str, num_clients: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """The figures of one way at one number of clients; milliseconds."""
    seconds = max(a.events[-1] for a in answers) - min(a.sent for a in answers)
    num_tokens = sum(a.num_tokens for a in answers)
    several = [a for a in answers if a.num_tokens > 1]
    figures = {
        "ttft": [a.events[0] - a.sent for a in answers],
        "tpot": [(a.events[-1] - a.events[0]) / (a.num_tokens - 1) for a in several],
        "itl": [gap for a in answers for gap in np.diff(a.events)],
    }
    return {
        "way": way,
        "clients": num_clients,
        "requests": len(answers),
        "tokens_per_second": num_tokens / seconds,
        **{
            name: {f"p{p}": 1e3 * float(np.percentile(values, p)) for p in PERCENTILES} if values else None
            for name, values in figures.items()
        },
    }


def start_server(model: str, drafts: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "specinfer", "serve", model, "--port", "0"]
    command += [
        "--max-num-seqs",
        str(MAX_NUM_SEQS),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--no-prefix-cache",
    ]
    command += [part for draft in drafts for part in ("--draft", draft)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on http://127\.0\.0\.1:(\d+)", line):
            return process, int(found[1])
    raise SystemExit("the server did not start")


def load_prompts(path: Path | None, llm: LLM, count: int) -> list[list[int]]:
    """Chats of the file, as the model sees them; without one, random tokens."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(0, 1000, (64,), generator=generator).tolist() for _ in range(count)]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    chats = [llm.tokenizer.apply_chat_template([{"role": "user", "content": r["turns"][0]}]) for r in rows]
    fitting = [chat for chat in chats if len(chat) <= MAX_MODEL_LEN // 2]
    return fitting[:: max(1, len(fitting) // count)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--count", type=int, default=64, help="requests per way and number of clients")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--random", choices=["100m", "1b"], help="a random model instead of the real target")
    parser.add_argument("--draft", nargs="+", default=["default", "ngram"])
    args = parser.parse_args()
    model = str(random_model(args.random)) if args.random else "smollm2-135m"
    drafts = ["ngram"] if args.random else args.draft
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "prefix_cache": False}
    llm = LLM(model, drafts=drafts, **limits)
    prompts = load_prompts(args.prompts, llm, args.count)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    body = {"temperature": 0, "max_tokens": args.max_tokens}
    plain = {**body, "speculation": {"enabled": False}}
    process, port = start_server(model, drafts)
    rows = []
    try:
        asyncio.run(load(port, prompts[:2], 1, body))
        bare(llm, prompts[:2], 1, params)
        for num_clients in args.clients:
            for way, answers in (
                ("speculation", asyncio.run(load(port, prompts, num_clients, body))),
                ("bare", bare(llm, prompts, num_clients, params)),
                ("plain", asyncio.run(load(port, prompts, num_clients, plain))),
            ):
                rows.append(row(way, num_clients, answers))
                print(line_of(rows[-1]), flush=True)
            served, alone = rows[-3]["tokens_per_second"], rows[-2]["tokens_per_second"]
            rows[-3]["overhead"] = 1 - served / alone
            print(f"{'':12}{num_clients:4} clients: overhead {100 * rows[-3]['overhead']:.1f} %", flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    if args.out:
        record = {
            "command": "python benchmarks/serving.py " + " ".join(sys.argv[1:]),
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}",
            "max_tokens": args.max_tokens,
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def line_of(figures: dict[str, Any]) -> str:
    """A row for people."""
    spread = "  ".join(
        f"{name} " + "/".join(f"{v:.0f}" for v in figures[name].values()) if figures[name] else f"{name} -"
        for name in ("ttft", "tpot", "itl")
    )
    way, clients, speed = figures["way"], figures["clients"], figures["tokens_per_second"]
    return f"{way:12}{clients:4} clients {speed:8.1f} tok/s   ms p50/90/99: {spread}"


if __name__ == "__main__":
    main()
