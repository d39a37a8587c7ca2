"""Plain decoding, the best chain and the best tree, per kind of prompt, in one interleaved run.

    python benchmarks/speed.py --prompts PATH/spec_bench.jsonl --out benchmarks/results/speed.json

Batch 1, greedy. Every way answers a prompt before the next prompt is taken, so that a noisy machine disturbs
all of them alike; figures are medians over prompts of tokens per second after the first token (1 / TPOT),
and the speedup is the median of the per-prompt ratios to plain. Others beside ours: --peer, transformers'
`generate` (bf16 and fp32); --llama NAME=URL, servers of llama.cpp; --openvino, OpenVINO GenAI. --model
measures another target with the same drafts (one made by widened_model.py, say), --random 1b a random
Llama of that size, without any download (speed only).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from peers import Sample, Way, add_peer_options, peer_ways
from random_model import random_model

from specinfer import LLM, SamplingParams
from specinfer.config import AUTO_TREE
from specinfer.draft.planner import Planner
from specinfer.engine.build import resolve_topology
from specinfer.models.catalog import draft_path

CHAINS = (AUTO_TREE, "1", "1,1", "1,1,1", "1,1,1,1")
TREES = ("2,1", "2,2", "3,1", "3,2,1,1")
KINDS = {  # Spec-Bench's categories, by what they are about
    "writing": "chat", "roleplay": "chat", "reasoning": "chat", "math": "chat", "coding": "chat",
    "extraction": "chat", "stem": "chat", "humanities": "chat",
}  # fmt: skip


def engine_way(llm: LLM, tree: str | None = None, num_drafts: int = 1) -> Way:
    parts = llm.engine.parts
    if tree is not None:
        topology = resolve_topology(tree)
        parts = replace(
            parts,
            topology=topology,
            planner=topology if isinstance(topology, Planner) else None,
            max_tree_nodes=1 + (topology.num_nodes - 1) * num_drafts,
        )

    def answer(prompt: list[int], max_tokens: int) -> Sample:
        llm.engine.parts = parts
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        timer = llm.engine.parts.timer
        request = llm.engine.add_request(prompt, params)[0]
        while request.first_token_time is None:
            llm.engine.step()
        timer.reset()
        while request.finish_reason is None:
            llm.engine.step()
        output = request.completion()
        steps = max(1, timer.num_steps)
        split = {name: 1e3 * s / steps for name, s in timer.seconds.items()}
        split["rest"] = 1e3 * timer.rest / steps
        split["step"] = 1e3 * timer.total / steps
        tpot = output.stats.tpot
        return Sample(
            request.first_token_time - request.arrival,
            1 / tpot if tpot else float("nan"),
            output.stats.acceptance_length,
            split,
            output.token_ids,
        )

    return answer


def load_prompts(args: argparse.Namespace, tokenizer: object) -> list[tuple[str, list[int]]]:
    if args.random or not args.prompts:
        generator = torch.Generator().manual_seed(0)
        return [
            ("random", torch.randint(0, 1000, (64,), generator=generator).tolist()) for _ in range(args.count)
        ]
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][:: args.every][: args.count]
    return [
        (
            KINDS.get(row["category"], row["category"]),
            tokenizer.apply_chat_template([{"role": "user", "content": row["turns"][0]}]),  # type: ignore[attr-defined]
        )
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="default", help="a draft that ships for smollm2-135m, or a path")
    parser.add_argument("--random", choices=["100m", "1b"], help="a random model instead of the real target")
    add_peer_options(parser)
    parser.add_argument("--trees", nargs="+", default=[*CHAINS, *TREES])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = random_model(args.random) if args.random else args.model
    draft = "ngram" if args.random else str(draft_path("smollm2-135m", args.draft))

    def build(*drafts: str) -> LLM:
        """Room for the largest tree; each way then puts in its own."""
        widest = max(*args.trees, AUTO_TREE, key=lambda tree: resolve_topology(tree).num_nodes)
        return LLM(
            model,
            drafts=drafts,
            tree=widest,
            dtype=args.dtype,
            quantize=args.quantize,
            device=args.device,
            max_num_seqs=1,
            max_model_len=2048,
            prefix_cache=False,
        )

    plain = build()
    drafted = build(draft)
    ways: dict[str, Way] = {"plain": engine_way(plain)}
    ways |= {f"<{tree}>": engine_way(drafted, tree) for tree in args.trees}
    if not args.random:
        ngram, merged = build("ngram"), build(draft, "ngram")
        ways |= {f"ngram <{tree}>": engine_way(ngram, tree) for tree in ("1,1,1,1", AUTO_TREE)}
        ways |= {f"merged <{tree}>": engine_way(merged, tree, 2) for tree in ("1,1", "2,1", AUTO_TREE)}
    ways |= peer_ways(args)
    prompts = load_prompts(args, plain.engine.tokenizer)
    for way in ways.values():
        way(prompts[0][1], 8)
    samples: dict[str, list[Sample]] = defaultdict(list)
    start = time.time()
    for i, (_, prompt) in enumerate(prompts):
        # A different way goes first each time.
        names = list(ways)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            samples[name].append(ways[name](prompt, args.max_tokens))
        print(f"prompt {i + 1}/{len(prompts)} {time.time() - start:.0f}s", flush=True)
        report(args, [kind for kind, _ in prompts[: i + 1]], samples, quiet=i + 1 < len(prompts))


def report(args: argparse.Namespace, kinds: list[str], samples: dict[str, list[Sample]], quiet: bool) -> None:
    plain = samples["plain"]
    rows = []
    for name, mine in samples.items():
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, plain, strict=True)]
        usable = [(k, s, r) for k, s, r in zip(kinds, mine, ratios, strict=True) if r == r]
        split = [s.milliseconds_per_step for s in mine if s.milliseconds_per_step]
        rows.append(
            {
                "way": name,
                "tokens_per_second": statistics.median(s.tokens_per_second for _, s, _ in usable),
                "speedup": statistics.median(r for _, _, r in usable),
                "speedup_by_kind": {
                    kind: statistics.median(r for k, _, r in usable if k == kind)
                    for kind in dict.fromkeys(k for k, _, _ in usable)
                },
                "acceptance_length": statistics.mean(s.acceptance_length for s in mine),
                "milliseconds_per_step": {
                    key: statistics.median(each[key] for each in split) for key in (split[0] if split else ())
                },
                "identical_to_plain": sum(a.tokens == b.tokens for a, b in zip(mine, plain, strict=True)),
                "prompts": len(mine),
            }
        )
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "command": shlex.join(
                        ["python", "benchmarks/speed.py"]
                        + [Path(a).name if Path(a).exists() else a for a in sys.argv[1:]]
                    ),
                    "date": datetime.date.today().isoformat(),
                    "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
                    f"{args.threads} threads, torch {torch.__version__}",
                    "dtype": args.dtype,
                    "max_tokens": args.max_tokens,
                    "rows": rows,
                },
                indent=1,
            )
            + "\n"
        )
    if quiet:
        return
    print(f"{'way':20}{'tok/s':>8}{'speedup':>9}{'acc.len':>9}{'same':>8}   ms per step")
    for row in rows:
        split = "  ".join(f"{k} {v:.2f}" for k, v in row["milliseconds_per_step"].items())
        print(
            f"{row['way']:20}{row['tokens_per_second']:8.1f}{row['speedup']:9.2f}{row['acceptance_length']:9.2f}"
            f"{row['identical_to_plain']:5}/{row['prompts']:<3}  {split}"
        )


if __name__ == "__main__":
    main()
