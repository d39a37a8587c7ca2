"""Logits of tree nodes against those of their paths decoded one token at a time: equal to the bit.

    python benchmarks/bits.py --out benchmarks/results/bits.json

For each kind of weights (fp32, bf16, int8, and the Q4 of the built-in target's file as stored) 1,000 random
trees of up to 12 nodes, eight at a time below contexts of eight lengths. Each tree runs alone and in a batch
of 8, with 1 and with 2 threads, below contexts computed at once; each path runs one token a forward in one
thread, context included. Resumable: what is done is kept in the output.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path

import numpy as np
import torch
from exactness import machine
from numpy.typing import NDArray
from steps import make_runner

from specinfer.attention import Span
from specinfer.models.catalog import resolve_model_path
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import Batch, Runner, WorkItem

CONTEXTS = (1, 7, 31, 32, 33, 64, 157, 400)
MAX_NODES = 12
Ints = NDArray[np.int64]


class Below:
    """Trees below the contexts, by one runner. The contexts' slots come first, then those of each tree."""

    def __init__(self, runner: Runner, contexts: list[Ints], at_once: bool) -> None:
        self._runner = runner
        ends = np.cumsum([len(c) for c in contexts])
        self._context_slots = [np.arange(end - len(c), end) for end, c in zip(ends, contexts, strict=True)]
        self._tree_slots = ends[-1] + np.arange(len(contexts) * MAX_NODES).reshape(len(contexts), MAX_NODES)
        for slots, tokens in zip(self._context_slots, contexts, strict=True):
            step = len(tokens) if at_once else 1
            for start in range(0, len(tokens), step):
                span = Span(slots[:start], slots[start : start + step], np.arange(-1, step - 1))
                self._run([WorkItem(span, tokens[start : start + step], np.array([step - 1]))])

    def trees(self, trees: dict[int, tuple[Ints, Ints]]) -> torch.Tensor:
        """[nodes of all, vocab]; trees: (parents, tokens) by the number of the context, in one forward."""
        return self._run(
            [
                WorkItem(
                    Span(self._context_slots[c], self._tree_slots[c, : len(tokens)], parents),
                    tokens,
                    np.arange(len(tokens)),
                )
                for c, (parents, tokens) in trees.items()
            ]
        )

    def paths(self, c: int, parents: Ints, tokens: Ints) -> torch.Tensor:
        """[nodes, vocab], one forward of one token for each node, after its ancestors'."""
        rows = []
        above: list[Ints] = []
        for node, parent in enumerate(parents):
            context = above[parent] if parent >= 0 else self._context_slots[c]
            slot = self._tree_slots[c, node : node + 1]
            above.append(np.concatenate([context, slot]))
            span = Span(context, slot, np.array([-1]))
            rows.append(self._run([WorkItem(span, tokens[node : node + 1], np.zeros(1, np.int64))]))
        return torch.cat(rows)

    def _run(self, items: list[WorkItem]) -> torch.Tensor:
        return self._runner.run(Batch.of(items))[0]


def random_tree(rng: np.random.Generator, vocab: int) -> tuple[Ints, Ints]:
    """Chains, bushes and several tops; a node follows its parent."""
    reach = rng.choice([1, 3, MAX_NODES])
    n = int(rng.integers(1, MAX_NODES + 1))
    parents = [int(rng.integers(max(-1, node - reach), node)) for node in range(n)]
    return np.array(parents), rng.integers(0, vocab, n)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ways", default="stored,int8,bf16,fp32")
    parser.add_argument("--trees", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(resolve_model_path(args.model))
    vocab = checkpoint.config.vocab_size
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, vocab, n) for n in CONTEXTS]
    result = {"machine": machine(), "model": args.model, "contexts": CONTEXTS, "rows": {}}
    if args.out.exists():
        kept = json.loads(args.out.read_text())
        result["rows"] = kept["rows"] if kept["machine"] == machine() else {}
    for way in args.ways.split(","):
        row = result["rows"].setdefault(way, {"trees": 0, "nodes": 0, "compared": 0, "differing": []})
        if row["trees"] >= args.trees:
            continue
        alone = Below(make_runner(way, checkpoint, 1), contexts, at_once=False)
        below = {t: Below(make_runner(way, checkpoint, t), contexts, at_once=True) for t in (1, 2)}
        start = time.time()
        while row["trees"] < args.trees:
            rng = np.random.default_rng(row["trees"] + 1)
            trees = {c: random_tree(rng, vocab) for c in range(len(contexts))}
            paths = torch.cat([alone.paths(c, *tree) for c, tree in trees.items()])
            for threads, runner in below.items():
                singles = torch.cat([runner.trees({c: tree}) for c, tree in trees.items()])
                for batch, found in ((1, singles), (len(trees), runner.trees(trees))):
                    is_equal = (found == paths).all(dim=1)
                    row["compared"] += len(paths)
                    row["differing"] += [
                        {"tree": row["trees"], "batch": batch, "threads": threads, "node": int(node)}
                        for node in (~is_equal).nonzero()
                    ]
            row["trees"] += len(trees)
            row["nodes"] += len(paths)
            result["date"] = datetime.date.today().isoformat()
            result["all_equal"] = all(not r["differing"] for r in result["rows"].values())
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        seconds = time.time() - start
        print(f"{way}: {row['nodes']} nodes, {len(row['differing'])} differ, {seconds:.0f}s", flush=True)


if __name__ == "__main__":
    main()
