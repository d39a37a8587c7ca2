"""Token equality on the real target: with speculation against without, to the last token.

    python benchmarks/exactness.py --prompts PATH/spec_bench.jsonl --out benchmarks/results/exactness.json

Every 10th prompt, 128 tokens, for each kind of weights (--dtypes: a dtype, auto for the file's own blocks, or
int8), temperature, way of drafting and batch size. Each is compared with plain decoding in the smallest batch
that was run; an answers file belongs to one choice of prompts (--every, --count). Resumable: answers
are kept beside the output (*.answers.jsonl, with the machine they were made on: other kinds of CPU
round differently), and an interrupted run goes on where it stopped. A mismatch is
reported with the gap between the two tokens' scores.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import platform
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from specinfer import LLM, SamplingParams
from specinfer.attention import Span
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.native import extension, wanted_level

WAYS = {
    "plain": ((), "1"),
    "chain": (("default",), "1,1,1,1"),
    "tree": (("default",), "3,2,1,1"),
    "merged": (("default", "ngram"), "2,2,1"),
    "ngram": (("ngram",), "1,1,1,1"),
}
Key = tuple[str, float, str, int]


class Work:
    """This machine's finished answers by (dtype, temperature, way, batch) and prompt, one JSON line each."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path = path
        self._machine = machine
        self.answers: dict[Key, dict[int, list[int]]] = defaultdict(dict)
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the line that an interruption cut
                if row["machine"] == machine:
                    self.answers[tuple(row["key"])][row["prompt"]] = row["tokens"]

    def add(self, key: Key, prompt: int, tokens: list[int]) -> None:
        self.answers[key][prompt] = tokens
        with self._path.open("a") as file:
            row = {"machine": self._machine, "key": key, "prompt": prompt, "tokens": tokens}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def machine() -> str:
    """What decides the bits of plain decoding."""
    native, level = extension(), wanted_level()
    path = "the torch path" if native is None or level is None else f"native {native.level(level)}"
    return f"{platform.machine()}, {path}, torch {torch.__version__}"


def read_prompts(path: Path, every: int, count: int) -> list[list[dict[str, str]]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [[{"role": "user", "content": row["turns"][0]}] for row in rows[::every][:count]]


def score_gap(llm: LLM, tokens: list[int], params: SamplingParams, a: int, b: int, num_prompt: int) -> float:
    """How far apart the scores of tokens a and b are after `tokens`, in plain decoding's arithmetic."""
    engine = llm.engine
    slots = engine.allocator.allocate(len(tokens))
    assert slots is not None
    n = len(tokens)
    item = WorkItem(Span(slots[:0], slots, np.arange(-1, n - 1)), np.array(tokens), np.array([n - 1]))
    logits, _ = engine.parts.runner.run(Batch.of([item]))
    engine.allocator.free(slots)
    request = engine.add_request(tokens[:num_prompt], params)[0]
    request.tokens = tokens
    scores = engine.parts.chooser.perturbed(logits, [request.row()])[0]
    engine.abort(request)
    return abs(float(scores[a] - scores[b]))


def run(llm: LLM, work: Work, key: Key, prompts: list[list[int]], max_tokens: int) -> None:
    """Answer what is missing, `batch` prompts at a time."""
    _, temperature, _, batch = key
    todo = [i for i in range(len(prompts)) if i not in work.answers[key]]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))
    ]
    start = time.time()
    for done in range(0, len(todo), batch):
        group = todo[done : done + batch]
        results = llm.generate([prompts[i] for i in group], [params[i] for i in group], progress=False)
        for i, result in zip(group, results, strict=True):
            work.add(key, i, list(result.outputs[0].token_ids))
        print(f"{key} {done + len(group)}/{len(todo)} {time.time() - start:.0f}s", flush=True)


def compare(
    work: Work, llms: dict[str, LLM], prompts: list[list[int]], max_tokens: int
) -> list[dict[str, object]]:
    """One row per configuration that has answers, against plain decoding in the smallest batch."""
    rows = []
    for key, answers in sorted(work.answers.items()):
        dtype, temperature, way, batch = key
        base = min((k for k in work.answers if k[:3] == (dtype, temperature, "plain")), default=key)
        if key == base:
            continue
        plain = work.answers[base]
        common = sorted(set(plain) & set(answers))
        mismatches = []
        for i in common:
            if plain[i] == answers[i]:
                continue
            at = next((j for j, (a, b) in enumerate(zip(plain[i], answers[i], strict=False)) if a != b), None)
            gap = None
            if at is not None and dtype in llms:
                params = SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
                tokens = prompts[i] + plain[i][:at]
                gap = score_gap(llms[dtype], tokens, params, plain[i][at], answers[i][at], len(prompts[i]))
            mismatches.append({"prompt": i, "position": at, "score_gap": gap})
        rows.append(
            {
                "dtype": dtype,
                "temperature": temperature,
                "way": way,
                "drafts": WAYS[way][0],
                "tree": WAYS[way][1],
                "batch": batch,
                "prompts": len(common),
                "tokens": sum(len(answers[i]) for i in common),
                "identical_prompts": len(common) - len(mismatches),
                "mismatches": mismatches,
                "sha256": hashlib.sha256(json.dumps([answers[i] for i in common]).encode()).hexdigest(),
            }
        )
    return rows


def options(args: argparse.Namespace) -> list[str]:
    """Those of the command line that decide what is answered."""
    names = ("every", "count", "dtypes", "temperatures", "ways", "batches")
    values = [(name, getattr(args, name)) for name in names]
    return [f"--{n} {' '.join(map(str, v)) if isinstance(v, list) else v}" for n, v in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = Work(args.out.with_suffix(".answers.jsonl"), machine())
    messages = read_prompts(args.prompts, args.every, args.count)
    llms: dict[str, LLM] = {}
    prompts: list[list[int]] = []
    for dtype, batch, way in itertools.product(args.dtypes, args.batches, args.ways):
        drafts, tree = WAYS[way]
        weights = {"quantize": "int8"} if dtype == "int8" else {"dtype": dtype}
        llm = LLM("smollm2-135m", drafts=drafts, tree=tree, max_num_seqs=batch, **weights)
        prompts = prompts or [llm.tokenizer.apply_chat_template(m) for m in messages]
        if way == "plain":
            llms[dtype] = llm
        for temperature in args.temperatures:
            run(llm, work, (dtype, temperature, way, batch), prompts, args.max_tokens)
            write(args, work, llms, prompts)
        del llm


def write(args: argparse.Namespace, work: Work, llms: dict[str, LLM], prompts: list[list[int]]) -> None:
    rows = compare(work, llms, prompts, args.max_tokens)
    result = {
        "command": " ".join(["python benchmarks/exactness.py --prompts spec_bench.jsonl", *options(args)]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "target": "smollm2-135m",
        "threads": args.threads,
        "prompts": f"one in {args.every} of Spec-Bench, at most {args.count}; {args.max_tokens} tokens",
        "all_identical": all(not row["mismatches"] for row in rows),
        "rows": rows,
    }
    partial = args.out.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(args.out)
    print(
        "\n".join(
            f"{r['dtype']} T={r['temperature']} {r['way']} batch {r['batch']}: "
            f"{r['identical_prompts']}/{r['prompts']} prompts identical, {r['tokens']} tokens"
            for r in rows
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
