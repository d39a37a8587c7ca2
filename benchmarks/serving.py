"""The server under load: throughput, TTFT, TPOT and ITL, plain against speculation, beside the bare engine.

    python benchmarks/serving.py --prompts PATH/spec_bench.jsonl --out benchmarks/results/serving.json

One server runs all the while; per number of clients, each of three ways answers the same chats: the server
with speculation, the server without (per request), and this process stepping an engine with speculation and
no server at all ("bare"), which keeps as many requests open. So do servers that --also names, of anyone's,
which run already: they must speak OpenAI's chats, stream usage, and keep no prompts from one round to the
next. Clients send their next request when the last is answered. Greedy, streamed. TTFT and TPOT are per
request, as the client sees them; ITL is the time between two events of a stream, each of one or more tokens.
Figures are medians over --repeats rounds, another way first in each. What --out holds already is kept, so
that a run can be made in parts (--clients).

"overhead" is what the server lacks to the bare engine's throughput, round by round (below 0: it was faster);
the clients run on the same cores and are part of it. Many short rounds of these two narrow it down:

    python benchmarks/serving.py --prompts ... --ways speculation bare --clients 16 --count 16 --max-tokens 32
        --repeats 20

milliseconds_per_step: the engine's, by phase. clients_cpu: CPU seconds per second of the clients. Of a server
of ours and of the bare engine, on Linux, milliseconds of CPU per token: cpu_per_token, of the whole process;
loop_per_token, of the server's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import random_model

from specinfer import LLM, SamplingParams

WAYS = ("speculation", "bare", "plain")
PERCENTILES = (50, 90, 99)
MAX_NUM_SEQS = 64
MIN_REQUESTS, REQUESTS_PER_CLIENT = 16, 8
MAX_MODEL_LEN = 1024
PHASES = ("draft", "target", "verify")


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent, when each event with text came, and the tokens it says it made."""

    sent: float
    events: list[float]
    num_tokens: int


@dataclass(frozen=True)
class Prompt:
    """A chat, as the model sees it and as a server is asked; without messages, tokens alone."""

    tokens: list[int]
    messages: list[dict[str, str]] | None = None

    def request(self) -> tuple[str, dict[str, Any]]:
        """Where it goes, and as what."""
        if self.messages is None:
            return "/v1/completions", {"prompt": self.tokens}
        return "/v1/chat/completions", {"messages": self.messages}


async def ask(host: str, prompt: Prompt, body: dict[str, Any]) -> Answer:
    """Stream one answer over a connection of its own. host: name:port."""
    name, _, port = host.rpartition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    path, asked = prompt.request()
    content = json.dumps(
        {**body, **asked, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    sent = time.perf_counter()
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    came = []
    while line := await reader.readline():
        if line.startswith((b"data: {", b"{")):
            came.append((time.perf_counter(), line))
    writer.close()
    events = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in came]
    if not events or not events[-1][1].get("usage"):
        raise SystemExit(f"{host} answered {events[-1:]}, no usage at its end")
    with_text = [at for at, event in events if any(map(text_of, event["choices"]))]
    return Answer(sent, with_text or [events[-1][0]], events[-1][1]["usage"]["completion_tokens"])


def text_of(choice: dict[str, Any]) -> str | None:
    """What a chunk adds; the first of a chat is often the role alone."""
    return choice["delta"].get("content") if "delta" in choice else choice["text"]


async def load(host: str, prompts: Sequence[Prompt], num_clients: int, body: dict[str, Any]) -> list[Answer]:
    """Every prompt answered once, by clients that wait for their answers."""
    left: Iterator[Prompt] = iter(prompts)

    async def client() -> list[Answer]:
        return [await ask(host, prompt, body) for prompt in left]

    clients = await asyncio.gather(*(client() for _ in range(num_clients)))
    return list(itertools.chain.from_iterable(clients))


def bare(llm: LLM, prompts: Sequence[Prompt], num_clients: int, params: SamplingParams) -> list[Answer]:
    """The same without a server: as many requests stay open, in one loop."""
    engine, left = llm.engine, list(reversed(prompts))
    running: dict[Any, list[float]] = {}
    answers = []
    while left or running:
        while left and len(running) < num_clients:
            running[engine.add_request(left.pop().tokens, params)[0]] = []
        for emission in engine.step():
            running[emission.request].append(time.perf_counter())
        for request in [r for r in running if r.finish_reason is not None]:
            answers.append(Answer(request.arrival, running.pop(request), request.num_output_tokens))
    return answers


@dataclass(frozen=True)
class Usage:
    """What was used so far, in seconds but for the steps; the difference of two is what a run used."""

    wall: float
    clients: float
    process: float
    loop: float
    step: float
    phases: dict[str, float]
    num_steps: float

    def shares_since(self, start: Usage, num_tokens: int) -> dict[str, Any]:
        wall, steps = self.wall - start.wall, max(1.0, self.num_steps - start.num_steps)
        phases = {name: 1e3 * (self.phases[name] - start.phases[name]) / steps for name in PHASES}
        step = 1e3 * (self.step - start.step) / steps
        return {
            "clients_cpu": (self.clients - start.clients) / wall,
            "cpu_per_token": 1e3 * (self.process - start.process) / num_tokens,
            "loop_per_token": 1e3 * (self.loop - start.loop) / num_tokens,
            "milliseconds_per_step": {**phases, "rest": step - sum(phases.values()), "step": step},
        }


class Server:
    """`specinfer serve` in a process of its own."""

    def __init__(self, model: str, drafts: Sequence[str], tree: str) -> None:
        limits = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MAX_MODEL_LEN)]
        command = [sys.executable, "-m", "specinfer", "serve", model, "--port", "0", "--tree", tree]
        command += ["--no-prefix-cache", *limits, *(part for draft in drafts for part in ("--draft", draft))]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"serving on http://127\.0\.0\.1:(\d+)", line):
                self.host = f"127.0.0.1:{found[1]}"
                return
        raise SystemExit("the server did not start")

    def usage(self) -> Usage:
        with urllib.request.urlopen(f"http://{self.host}/metrics") as answer:
            text = answer.read().decode()

        def counter(name: str) -> float:
            found = re.search(rf"^specinfer:{name} (\S+)$", re.sub(r'{model_name="[^"]*",?', "{", text), re.M)
            assert found is not None, name
            return float(found[1])

        process = Path(f"/proc/{self.process.pid}")
        return Usage(
            time.perf_counter(),
            time.process_time(),
            cpu_seconds(process / "stat"),
            cpu_seconds(process / f"task/{self.process.pid}/stat"),
            counter(r"step_seconds_total\{\}"),
            {phase: counter(rf'phase_seconds_total\{{phase="{phase}"\}}') for phase in PHASES},
            counter(r"steps_total\{\}"),
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def cpu_seconds(stat: Path) -> float:
    """That a process or a thread has used, with its kernel's; 0 where the system has no such file."""
    ticks = sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) if stat.exists() else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def usage_of(llm: LLM) -> Usage:
    """The same of an engine in this process; its time is the engine's, not the clients'."""
    timer, now = llm.engine.parts.timer, time.perf_counter()
    return Usage(now, 0.0, time.process_time(), 0.0, timer.total, dict(timer.seconds), timer.num_steps)


def row(way: str, num_clients: int, answers: Sequence[Answer], used: dict[str, Any]) -> dict[str, Any]:
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
            name: {f"p{p}": 1e3 * float(np.percentile(values, p)) for p in PERCENTILES}
            for name, values in figures.items()
        },
        **used,
    }


def median_of(rows: Sequence[Any]) -> Any:
    """Of every figure in rows that are alike."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: median_of([row[key] for row in rows]) for key in first}
    return statistics.median(rows) if isinstance(first, float) else first


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds by number of clients and way, and what the server lacks to the bare engine."""
    groups: dict[tuple[int, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        figures = {key: value for key, value in run.items() if key != "round"}
        groups[run["clients"], run["way"]][run["round"]] = figures
    rows = []
    for (num_clients, way), by_round in sorted(groups.items()):
        made = {**median_of([*by_round.values()]), "rounds": len(by_round)}
        if way == "speculation":
            alone = groups[num_clients, "bare"]
            made["overheads"] = [
                1 - run["tokens_per_second"] / alone[i]["tokens_per_second"]
                for i, run in by_round.items()
                if i in alone
            ]
            made["overhead_interval"] = interval_of_median(made["overheads"])
        rows.append(made)
    return rows


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the median of what they are drawn from lies, with at least 95 % confidence, whatever the law; too
    few values say nothing."""
    n = len(values)
    outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n)]  # k-th smallest
    inside = [k for k in range(n) if outside[k] <= 0.05]
    return (sorted(values)[inside[-1]], sorted(values)[n - 1 - inside[-1]]) if inside else None


def load_prompts(path: Path | None, llm: LLM, count: int) -> list[Prompt]:
    """Chats of the file; without one, random tokens."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        return [Prompt(torch.randint(0, 1000, (64,), generator=generator).tolist()) for _ in range(count)]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    chats = [[{"role": "user", "content": row["turns"][0]}] for row in rows]
    prompts = [Prompt(llm.tokenizer.apply_chat_template(chat), chat) for chat in chats]
    fitting = [prompt for prompt in prompts if len(prompt.tokens) <= MAX_MODEL_LEN // 2]
    return fitting[:: max(1, len(fitting) // count)][:count]


Way = tuple[Callable[[Sequence[Prompt], int], list[Answer]], Callable[[], Usage] | None]
"""How to answer prompts with a number of clients, and what was used so far, where that can be known."""


def served(host: str, body: dict[str, Any], usage: Callable[[], Usage] | None) -> Way:
    """By a server at name:port."""
    return lambda prompts, clients: asyncio.run(load(host, prompts, clients, body)), usage


def also(name_and_url: str, body: dict[str, Any]) -> tuple[str, Way]:
    """Another server, NAME=http://HOST:PORT; the model is the first that it offers."""
    name, _, url = name_and_url.partition("=")
    host = url.removeprefix("http://").strip("/")
    with urllib.request.urlopen(f"http://{host}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    return name, served(host, {**body, "model": model}, None)


def measure(name: str, way: Way, prompts: Sequence[Prompt], num_clients: int) -> dict[str, Any]:
    """One run of one way, shown as it ends."""
    run, usage = way
    before = usage and usage()
    answers = run(prompts, num_clients)
    used = {} if usage is None else usage().shares_since(before, sum(a.num_tokens for a in answers))
    made = row(name, num_clients, answers, used)
    print(line_of(made), flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--count", type=int, default=64, help="most requests per way and number of clients")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--random", choices=["100m", "1b"], help="a random model instead of the real target")
    parser.add_argument("--draft", nargs="+", default=["default", "ngram"])
    parser.add_argument("--tree", default="auto")
    args = parser.parse_args()
    model = str(random_model(args.random)) if args.random else "smollm2-135m"
    drafts = ["ngram"] if args.random else args.draft
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "prefix_cache": False}
    llm = LLM(model, drafts=drafts, tree=args.tree, **limits)
    prompts = load_prompts(args.prompts, llm, args.count)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    body = {"temperature": 0, "max_tokens": args.max_tokens}
    plain = {**body, "speculation": {"enabled": False}}
    others = dict(also(server, body) for server in args.also)
    server = Server(model, drafts, args.tree)
    own: dict[str, Way] = {
        "speculation": served(server.host, body, server.usage),
        "bare": (lambda prompts, clients: bare(llm, prompts, clients, params), lambda: usage_of(llm)),
        "plain": served(server.host, plain, server.usage),
    }
    ways = {name: own[name] for name in args.ways} | others
    runs = json.loads(args.out.read_text())["runs"] if args.out and args.out.exists() else []
    first = 1 + max((run["round"] for run in runs), default=0)
    try:
        for run, _ in ways.values():
            run(prompts[:2], 1)
        for num_clients in args.clients:
            num_requests = min(len(prompts), max(MIN_REQUESTS, REQUESTS_PER_CLIENT * num_clients))
            some = prompts[:: len(prompts) // num_requests][:num_requests]
            for i in range(first, first + args.repeats):
                for name in [*ways][i % len(ways) :] + [*ways][: i % len(ways)]:
                    runs.append({"round": i, **measure(name, ways[name], some, num_clients)})
                save(args, drafts, runs)
    finally:
        server.stop()
    for made in summary(runs):
        print(line_of(made))


def save(args: argparse.Namespace, drafts: Sequence[str], runs: Sequence[dict[str, Any]]) -> None:
    """After every round: one that is interrupted has the rounds before."""
    if args.out:
        record = {
            "command": " ".join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]),
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}",
            "drafts": drafts,
            "tree": args.tree,
            "max_tokens": args.max_tokens,
            "rows": summary(runs),
            "runs": runs,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def line_of(figures: dict[str, Any]) -> str:
    """A row for people."""
    spread = "  ".join(
        f"{name} " + "/".join(f"{v:.0f}" for v in figures[name].values()) for name in ("ttft", "tpot", "itl")
    )
    way, clients, speed = figures["way"], figures["clients"], figures["tokens_per_second"]
    overheads = [100 * share for share in figures.get("overheads", ())]
    overhead = f"  overhead {statistics.median(overheads):.1f} %" if overheads else ""
    if figures.get("overhead_interval"):
        overhead += " ({:.1f} to {:.1f})".format(*(100 * share for share in figures["overhead_interval"]))
    if "cpu_per_token" in figures:
        overhead += f"  CPU ms/token {figures['cpu_per_token']:.2f}, loop {figures['loop_per_token']:.2f}"
    return f"{way:12}{clients:4} clients {speed:8.1f} tok/s   ms p50/90/99: {spread}{overhead}"


if __name__ == "__main__":
    main()
