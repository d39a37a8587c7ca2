"""Prompt tokens per second, beside transformers, llama.cpp's servers and OpenVINO GenAI, interleaved.

    python benchmarks/prefill.py --lengths 512 2048 --peer --llama "llama.cpp bf16=http://127.0.0.1:8091"

A prompt of random tokens, a new one each time, and one token of answer: the time to it. Medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from peers import Way, add_peer_options, peer_ways
from speed import engine_way

from specinfer import LLM

WAYS = {"bf16": {"dtype": "bfloat16"}, "int8": {"quantize": "int8"}, "stored": {}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    add_peer_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    longest = max(args.lengths) + 8
    ways: dict[str, Way] = {
        name: engine_way(
            LLM("smollm2-135m", max_num_seqs=1, max_model_len=longest, prefix_cache=False, **options)
        )
        for name, options in WAYS.items()
    }
    ways |= peer_ways(args)
    generator = torch.Generator().manual_seed(0)
    speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for repeat in range(args.repeats + 1):
        for length in args.lengths:
            prompt = torch.randint(100, 40000, (length,), generator=generator).tolist()
            for name, way in ways.items():
                speeds[name, length].append(length / way(prompt, 1).seconds_to_first)
        print(f"round {repeat} of {args.repeats}", flush=True)
    print(f"{'way':20}" + "".join(f"{length:>10}" for length in args.lengths))
    for name in ways:  # the first of each warms up
        print(
            f"{name:20}"
            + "".join(f"{statistics.median(speeds[name, length][1:]):10.0f}" for length in args.lengths)
        )


if __name__ == "__main__":
    main()
