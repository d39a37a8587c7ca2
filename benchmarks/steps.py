"""Time of one forward by rows and context, native by kind of weights beside the torch path, interleaved.

    python benchmarks/steps.py --threads 2 --contexts 256 --rows 1,2,4,8,12,16,32,64 --ways bf16,int8,stored

Ways: fp32, bf16, int8, stored (a GGUF's quantised weights as they are), torch (the torch path in fp32);
linears and linears-bf16 are torch's linears alone, without norms, attention and activations.
A tree of that many rows below a context of random K/V in scattered slots, all its logits wanted. Minima and
medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch
from random_model import SIZES, random_model

from specinfer.attention import Span
from specinfer.models.catalog import draft_path, resolve_model_path
from specinfer.models.config import ModelConfig
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import Checkpoint, open_checkpoint
from specinfer.runtime import Batch, Runner, WorkItem, make_pool, make_torch_runner
from specinfer.runtime.kept import Keep
from specinfer.runtime.native import NativeRunner

NUM_SLOTS = 1200
CPU = torch.device("cpu")
LINEARS = {"linears": torch.float32, "linears-bf16": torch.bfloat16}
KEPT: dict[str, Keep] = {"int8": "int8", "stored": "stored"}


def read_speed() -> float:
    """Bytes a second at which this machine reads memory: torch's largest of 256 MiB, best of 15."""
    numbers = torch.from_numpy(np.ones(64 << 20, np.float32))  # numpy's large arrays lie in huge pages
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        numbers.max()
        seconds.append(time.perf_counter() - start)
    return numbers.nbytes / min(seconds)


class Linears:
    """All linears of a model with gated inner rows, by torch's matrix library, on random weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        read = attended + 2 * config.num_kv_heads * config.head_dim
        layer = [(read, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)]
        shapes = config.num_layers * layer + [(config.vocab_size, hidden)]
        self._weights = [torch.randn(shape).to(dtype) for shape in shapes]

    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        for weight in self._weights:
            rows = torch.ones(len(batch.token_ids), weight.shape[1], dtype=weight.dtype)
            torch.nn.functional.linear(rows, weight)


def make_runner(way: str, checkpoint: Checkpoint, threads: int, num_slots: int = NUM_SLOTS) -> Runner:
    dtype = torch.float32 if way in ("fp32", "torch") else torch.bfloat16
    pool = make_pool(checkpoint.config, num_slots, dtype, CPU)
    if way != "torch":
        keep = KEPT.get(way, "dtype")
        return NativeRunner(checkpoint, dtype, pool, num_slots, keep=keep, num_threads=threads)
    return make_torch_runner(checkpoint, LinearFactory(dtype, CPU), pool, num_slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="100m and 1b are random ones")
    parser.add_argument("--draft", action="store_true", help="the model's default draft instead of it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", default="fp32,bf16,torch")
    parser.add_argument("--contexts", default="100,300")
    parser.add_argument("--rows", default="1,2,4,8,13,22,96")
    parser.add_argument("--seconds", type=float, default=2.0, help="per line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contexts = [int(n) for n in args.contexts.split(",")]
    num_rows = [int(n) for n in args.rows.split(",")]
    num_slots = max(NUM_SLOTS, max(contexts) + max(num_rows))
    model = random_model(args.model, num_slots) if args.model in SIZES else args.model
    path = draft_path(model, "tokens") if args.draft else resolve_model_path(model)
    checkpoint = open_checkpoint(path)
    if max(contexts) + max(num_rows) > checkpoint.config.max_position:
        parser.error(f"{args.model} has {checkpoint.config.max_position} positions")
    ways: dict[str, Runner | Linears] = {}
    for way in args.ways.split(","):
        if way in LINEARS:
            ways[way] = Linears(checkpoint.config, LINEARS[way])
        else:
            ways[way] = runner = make_runner(way, checkpoint, args.threads, num_slots)
            for tensor in (*runner.pool.k, *runner.pool.v):
                tensor.normal_()
    vocab = checkpoint.config.vocab_size
    rng = np.random.default_rng(0)
    slots = rng.permutation(num_slots)
    print(f"{args.threads} threads, load {os.getloadavg()[0]:.1f}; ms: minimum median")
    print(f"memory is read at {read_speed() / 1e9:.1f} GB/s")
    print(f"{'context':>8} {'rows':>5}  " + "  ".join(f"{way:>15}" for way in ways))
    for context in contexts:
        for n in num_rows:
            parents = np.array([-1] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, n)])
            span = Span(slots[:context], slots[context : context + n], parents)
            batch = Batch.of([WorkItem(span, rng.integers(0, vocab, n), np.arange(n))])
            times: dict[str, list[float]] = {way: [] for way in ways}
            for each in ways.values():
                each.run(batch)
            end = time.perf_counter() + args.seconds
            while time.perf_counter() < end:
                for way, each in ways.items():
                    start = time.perf_counter()
                    each.run(batch)
                    times[way].append(1e3 * (time.perf_counter() - start))
            cells = "  ".join(f"{min(t):7.2f} {statistics.median(t):7.2f}" for t in times.values())
            print(f"{context:8} {n:5}  {cells}", flush=True)


if __name__ == "__main__":
    main()
