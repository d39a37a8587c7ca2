"""Time of one forward by rows and context, native by kind of weights beside the torch path, interleaved.

    python benchmarks/steps.py --threads 2 --contexts 256 --rows 1,2,4,8,12,16,32,64 --ways bf16,int8,stored

Ways: fp32, bf16, int8, stored (a GGUF's quantised weights as they are), torch (the torch path in fp32).
A tree of that many rows below a context in scattered slots, all its logits wanted. Minima and medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch

from specinfer.attention import Span
from specinfer.models.catalog import draft_path, resolve_model_path
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import Checkpoint, open_checkpoint
from specinfer.runtime import Batch, Runner, WorkItem, make_pool, make_torch_runner
from specinfer.runtime.kept import Keep
from specinfer.runtime.native import NativeRunner

NUM_SLOTS = 1200
CPU = torch.device("cpu")
KEPT: dict[str, Keep] = {"int8": "int8", "stored": "stored"}


def make_runner(way: str, checkpoint: Checkpoint, threads: int) -> Runner:
    dtype = torch.float32 if way in ("fp32", "torch") else torch.bfloat16
    pool = make_pool(checkpoint.config, NUM_SLOTS, dtype, CPU)
    if way != "torch":
        keep = KEPT.get(way, "dtype")
        return NativeRunner(checkpoint, dtype, pool, NUM_SLOTS, keep=keep, num_threads=threads)
    return make_torch_runner(checkpoint, LinearFactory(dtype, CPU), pool, NUM_SLOTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", action="store_true", help="the model's default draft instead of it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", default="fp32,bf16,torch")
    parser.add_argument("--contexts", default="100,300")
    parser.add_argument("--rows", default="1,2,4,8,13,22,96")
    parser.add_argument("--seconds", type=float, default=2.0, help="per line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = draft_path(args.model, "default") if args.draft else resolve_model_path(args.model)
    checkpoint = open_checkpoint(path)
    ways = {way: make_runner(way, checkpoint, args.threads) for way in args.ways.split(",")}
    contexts = [int(n) for n in args.contexts.split(",")]
    vocab = checkpoint.config.vocab_size
    rng = np.random.default_rng(0)
    slots = rng.permutation(NUM_SLOTS)
    longest = max(contexts)
    span = Span(slots[:0], slots[:longest], np.arange(-1, longest - 1))
    prompt = WorkItem(span, rng.integers(0, vocab, longest), np.zeros(1, np.int64))
    for runner in ways.values():
        runner.run(Batch.of([prompt]))
    print(f"{args.threads} threads, load {os.getloadavg()[0]:.1f}; ms: minimum median")
    print(f"{'context':>8} {'rows':>5}  " + "  ".join(f"{way:>15}" for way in ways))
    for context in contexts:
        for n in (int(n) for n in args.rows.split(",")):
            parents = np.array([-1] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, n)])
            span = Span(slots[:context], slots[context : context + n], parents)
            batch = Batch.of([WorkItem(span, rng.integers(0, vocab, n), np.arange(n))])
            times: dict[str, list[float]] = {way: [] for way in ways}
            end = time.perf_counter() + args.seconds
            while time.perf_counter() < end:
                for way, runner in ways.items():
                    start = time.perf_counter()
                    runner.run(batch)
                    times[way].append(1e3 * (time.perf_counter() - start))
            cells = "  ".join(f"{min(t):7.2f} {statistics.median(t):7.2f}" for t in times.values())
            print(f"{context:8} {n:5}  {cells}", flush=True)


if __name__ == "__main__":
    main()
