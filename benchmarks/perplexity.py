"""Perplexity of the target by the kind of its weights, over human-written prompts, by the engine's runner.

    python benchmarks/perplexity.py --prompts spec_bench.jsonl --ways bf16,int8,stored

Every way sees the same chunks of 512 tokens; a chunk's first token is context only. KL is the mean divergence
from the first way, in nats; same is how often the likeliest token is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from steps import make_runner

from specinfer.attention import Span
from specinfer.models.catalog import resolve_model_path
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, Runner, WorkItem

CHUNK = 512


def texts(path: Path) -> Iterator[str]:
    """Every turn of a JSON-lines file of prompts."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield from json.loads(line)["turns"]


def log_probabilities(runner: Runner, tokens: np.ndarray) -> torch.Tensor:
    """[len(tokens) - 1, vocab], of the token after each but the last."""
    n = len(tokens)
    span = Span(np.zeros(0, np.int64), np.arange(n), np.arange(-1, n - 1))
    logits, _ = runner.run(Batch.of([WorkItem(span, tokens, np.arange(n - 1))]))
    return logits.float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--ways", default="bf16,int8,stored")
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model_path(args.model))
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    tokens = np.array([t for text in texts(args.prompts) for t in tokenizer.encode(text + "\n\n")])
    chunks = tokens[: args.chunks * CHUNK].reshape(-1, CHUNK)
    ways = {way: make_runner(way, checkpoint, args.threads) for way in args.ways.split(",")}
    loss, divergence, same = (dict.fromkeys(ways, 0.0) for _ in range(3))
    for chunk in chunks:
        first = None
        for way, runner in ways.items():
            found = log_probabilities(runner, chunk)
            first = found if first is None else first
            loss[way] -= found.gather(1, torch.from_numpy(chunk[1:, None])).sum().item()
            divergence[way] += (first.exp() * (first - found)).sum().item()
            same[way] += (first.argmax(-1) == found.argmax(-1)).sum().item()
    count = chunks.shape[0] * (CHUNK - 1)
    print(f"{count} tokens of {args.prompts.name}")
    print(f"{'way':8} {'perplexity':>11} {'KL':>9} {'same':>7}")
    for way in ways:
        print(
            f"{way:8} {math.exp(loss[way] / count):11.4f} {divergence[way] / count:9.5f}"
            f" {100 * same[way] / count:6.2f}%"
        )


if __name__ == "__main__":
    main()
