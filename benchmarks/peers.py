"""Ways to answer a prompt, ours and others', behind one signature."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Sample:
    """One way's answer to one prompt."""

    seconds_to_first: float
    tokens_per_second: float
    acceptance_length: float
    milliseconds_per_step: dict[str, float]
    tokens: tuple[int, ...]


END = 2  # SmolLM2's <|im_end|>
Way = Callable[[list[int], int], Sample]


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """What `peer_ways` reads, besides `threads`."""
    parser.add_argument("--peer", action="store_true", help="transformers' generate in the same run")
    parser.add_argument("--llama", nargs="+", default=[], metavar="NAME=URL", help="llama.cpp's servers")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "MODEL"), help="see openvino_way")


def peer_ways(args: argparse.Namespace) -> dict[str, Way]:
    """The peers that were asked for, by name."""
    ways: dict[str, Way] = {}
    if args.peer:
        ways["transformers bf16"] = transformers_way(torch.bfloat16)
        ways["transformers fp32"] = transformers_way(torch.float32)
    for name, url in (server.split("=", 1) for server in args.llama):
        ways[name] = llama_way(url)
    if args.openvino:
        ways["OpenVINO"] = openvino_way(*args.openvino, args.threads)
    return ways


def transformers_way(dtype: torch.dtype) -> Way:
    """transformers' own generate on the same weights, greedy, through its own cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specinfer.models.catalog import resolve_model_path
    from specinfer.models.gguf import GGUFFile

    gguf = GGUFFile(resolve_model_path("smollm2-135m"))
    config = LlamaConfig(**gguf.config())
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: gguf.get(name).to(dtype) for name in gguf.names()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    rope = config.rope_parameters["rope_theta"]
    inverse = 1.0 / (rope ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim))
    model.model.rotary_emb.inv_freq = inverse
    model.model.rotary_emb.original_inv_freq = inverse
    model.eval()

    class Clock:
        """A streamer that notes when tokens come."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def answer(prompt: list[int], max_tokens: int) -> Sample:
        clock = Clock()
        start = time.perf_counter()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=END,
                eos_token_id=END,
                streamer=clock,
            )
        # The first call hands over the prompt.
        first, last = clock.times[1], clock.times[-1]
        n = len(clock.times) - 1
        speed = (n - 1) / (last - first) if n > 1 else float("nan")
        return Sample(first - start, speed, 1.0, {}, tuple(out[0, len(prompt) :].tolist()))

    return answer


def llama_way(url: str) -> Way:
    """llama.cpp's `llama-server` at a URL, greedy, its prompt cache unused; the speed is its own figure."""

    def answer(prompt: list[int], max_tokens: int) -> Sample:
        body = {
            "prompt": prompt, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            result = json.load(response)
        timings, tokens = result["timings"], tuple(result["tokens"])
        num_steps = len(tokens) - timings.get("draft_n_accepted", 0)
        return Sample(
            timings["prompt_ms"] / 1000,
            timings["predicted_per_second"],
            len(tokens) / max(1, num_steps),
            {},
            tokens,
        )

    return answer


def openvino_way(python: str, model: str, threads: int) -> Way:
    """OpenVINO GenAI in the environment of `python`, on a model that optimum-cli exported; greedy, the speed
    is its own figure. Its process ends with ours."""
    worker = subprocess.Popen(
        [python, Path(__file__).with_name("openvino_worker.py"), model, str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def answer(prompt: list[int], max_tokens: int) -> Sample:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens, "end": END}) + "\n")
        worker.stdin.flush()
        result = json.loads(worker.stdout.readline())
        tpot = result["tpot"] / 1000
        speed = 1 / tpot if tpot > 0 else float("nan")
        return Sample(result["ttft"] / 1000, speed, 1.0, {}, tuple(result["tokens"]))

    return answer
