"""Memory that loading a model takes, by the kind of its weights, and that a chat of 4096 tokens takes.

    python benchmarks/memory.py --ways stored,bf16,int8

MiB of resident memory, beside what the process held when everything was imported; each in a process of its
own. Needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from random_model import random_model

from specinfer import LLM, SamplingParams
from specinfer.models.catalog import resolve_model_path
from specinfer.models.loader import open_checkpoint
from specinfer.runtime import make_pool
from specinfer.runtime.kept import Keep
from specinfer.runtime.native import NativeRunner

KEPT: dict[str, Keep] = {"int8": "int8", "stored": "stored"}
SETTINGS: dict[str, dict[str, Any]] = {
    "stored": {}, "bf16": {"dtype": "bfloat16"}, "fp32": {"dtype": "float32"}, "int8": {"quantize": "int8"},
}  # fmt: skip
PROMPT, ANSWER = 3968, 128


def memory(key: str) -> float:
    """MiB: VmRSS is resident now, VmHWM the most since `start`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def start() -> float:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return memory("VmRSS")


def load(path: str, way: str) -> tuple[float, float, float]:
    """Packed, then resident and at the peak."""
    dtype = torch.float32 if way == "fp32" else torch.bfloat16
    before = start()
    checkpoint = open_checkpoint(Path(path))
    pool = make_pool(checkpoint.config, 1, dtype, torch.device("cpu"))
    runner = NativeRunner(checkpoint, dtype, pool, 1, keep=KEPT.get(way, "dtype"))
    return runner.model.num_bytes / 2**20, memory("VmRSS") - before, memory("VmHWM") - before


def chat(path: str, way: str) -> tuple[float, float]:
    """K/V of the tokens, then at the peak."""
    before = start()
    llm = LLM(path, **SETTINGS[way])
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    llm.generate([[1 + i % 1000 for i in range(PROMPT)]], params, progress=False)
    pool = llm.engine.parts.runner.pool
    kv = pool.num_bytes / pool.k[0].shape[0] * (PROMPT + ANSWER)
    return kv / 2**20, memory("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="or a size of random_model.py: 100m or 1b")
    parser.add_argument("--ways", default="stored,bf16,int8")
    args = parser.parse_args()
    is_random = args.model in ("100m", "1b")
    path = Path(random_model(args.model) if is_random else resolve_model_path(args.model))
    file = sum(f.stat().st_size for f in path.glob("*.safetensors")) if path.is_dir() else path.stat().st_size
    spawn = multiprocessing.get_context("spawn")
    print(f"{args.model}: file {file / 2**20:.0f} MiB")
    print(
        f"{'way':8} {'packed':>8} {'resident':>9} {'peak':>6} {'/ packed':>9}   {'K/V':>5} {'chat peak':>10}"
    )
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as process:
        for way in args.ways.split(","):
            packed, resident, peak = process.submit(load, str(path), way).result()
            line = f"{way:8} {packed:8.0f} {resident:9.0f} {peak:6.0f} {peak / packed:9.2f}"
            if not is_random:  # made for fewer positions
                kv, chat_peak = process.submit(chat, str(path), way).result()
                line += f"   {kv:5.0f} {chat_peak:10.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
