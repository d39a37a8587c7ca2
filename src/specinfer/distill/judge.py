"""Stage 3: what a draft is worth, in the real engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specinfer.config import check_positive
from specinfer.distill.forcing import Text
from specinfer.distill.hits import coverage, draft_ranks, union
from specinfer.distill.meter import Meter
from specinfer.distill.prompts import read_prompts, takes_chat
from specinfer.errors import ConfigError
from specinfer.interrupt import Interrupted, catch_interrupt
from specinfer.llm import LLM
from specinfer.models.catalog import draft_path
from specinfer.models.loader import open_checkpoint
from specinfer.outputs import CompletionOutput
from specinfer.sampling_params import SamplingParams
from specinfer.tree import parse_topology

TEMPERATURES = (0.0, 0.7, 1.0)
CHAINS = ("1", "1,1", "1,1,1,1")
TREES = ("2,1", "2,2,1", "3,2,1,1")
PLAIN = "plain"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Pace:
    """One way of decoding at one temperature, over all prompts.

    acceptance_length: tokens per step, the bonus token included. tokens_per_second: median over prompts,
    after the first token; speedup: median of the per-prompt ratios to plain decoding; both None where
    nothing was timed. num_identical: prompts with plain decoding's tokens.
    """

    way: str
    temperature: float
    acceptance_length: float
    tokens_per_second: float | None
    speedup: float | None
    num_identical: int


def judge_drafts(
    target: str,
    drafts: Sequence[str],
    prompts: Path,
    *,
    every: int,
    max_tokens: int,
    num_timed: int,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Drafts on every n-th prompt of a file: coverage of the target's greedy answers, each draft's own and
    all together; chains and trees on the first `num_timed` of these prompts, 0 for none."""
    check_positive("every", every)
    if num_timed < 0:
        raise ConfigError(f"timed must not be negative, got {num_timed}")
    asked = read_prompts(prompts)[::every]
    llm = LLM(target, device=device)
    is_chat = takes_chat(llm.tokenizer)
    ids = [prompt.token_ids(llm.tokenizer, is_chat) for prompt in asked]
    results = llm.generate(ids, SamplingParams(temperature=0, max_tokens=max_tokens), progress=not quiet)
    answers = [np.array(result.outputs[0].token_ids, np.int64) for result in results]
    texts = [Text(np.array([*one, *tokens]), len(one)) for one, tokens in zip(ids, answers, strict=True)]
    paths = [draft_path(target, draft) for draft in drafts]
    ranks = [draft_ranks(target, path, texts, answers, llm.engine.vocab_size, device) for path in paths]
    read = [open_checkpoint(path).reads_features for path in paths]
    found = {draft: coverage(one, reads) for draft, one, reads in zip(drafts, ranks, read, strict=True)}
    if len(drafts) > 1:
        found["together"] = coverage(union(ranks), any(read))
    timed = ids[:num_timed]
    measured: list[Pace] = []
    if timed:
        measured = paces(target, drafts, timed, max_tokens=max_tokens, device=device, quiet=quiet)
    return {
        "target": target,
        "num_prompts": len(ids),
        "num_tokens": sum(map(len, answers)),
        "coverage": found,
        "paces": [asdict(one) for one in measured],
    }


def paces(
    target: str,
    drafts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    device: str = "auto",
    quiet: bool = False,
) -> list[Pace]:
    """Plain decoding, chains and trees side by side: every way answers a prompt before the next one is taken,
    so that a noisy machine disturbs all of them alike. Batch 1."""
    longest = max_tokens + max(map(len, prompts))
    widest = max((*CHAINS, *TREES), key=lambda tree: parse_topology(tree).num_nodes)
    limits: dict[str, Any] = {
        "device": device, "max_num_seqs": 1, "prefix_cache": False, "max_model_len": longest
    }  # fmt: skip
    plain = LLM(target, **limits)
    drafted = LLM(target, drafts=drafts, tree=widest, **limits)
    ways = [(plain, PLAIN), *((drafted, tree) for tree in (*CHAINS, *TREES))]
    warm_up = SamplingParams(temperature=0, max_tokens=min(WARM_UP_TOKENS, max_tokens))
    for llm, way in ways:
        answer(llm, way, prompts[0], warm_up)
    samples: dict[tuple[float, str], list[CompletionOutput]] = {}
    with (
        catch_interrupt() as interrupt,
        Meter("judging", len(prompts) * len(TEMPERATURES), quiet=quiet) as meter,
    ):
        for i, prompt in enumerate(prompts):
            for j, temperature in enumerate(TEMPERATURES):
                params = SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
                start = (i + j) % len(ways)  # a different way goes first each time
                for llm, way in ways[start:] + ways[:start]:
                    samples.setdefault((temperature, way), []).append(answer(llm, way, prompt, params))
                    if interrupt.is_set:
                        raise Interrupted("interrupted while judging; the same command judges again")
                meter.show(i * len(TEMPERATURES) + j + 1, f"temperature {temperature}")
    return [
        pace(way, temperature, samples[temperature, way], samples[temperature, PLAIN])
        for temperature in TEMPERATURES
        for _, way in ways
    ]


def answer(llm: LLM, way: str, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
    """One prompt with one tree."""
    if way != PLAIN:
        llm.engine.parts = replace(llm.engine.parts, topology=parse_topology(way))
    return llm.generate([list(prompt)], params, progress=False)[0].outputs[0]


def pace(
    way: str, temperature: float, mine: Sequence[CompletionOutput], plain: Sequence[CompletionOutput]
) -> Pace:
    """Sum up one way. mine, plain: the same prompts in the same order."""
    timed = [
        (a.stats.tpot, b.stats.tpot)
        for a, b in zip(mine, plain, strict=True)
        if a.stats.tpot and b.stats.tpot
    ]
    num_steps = sum(output.stats.num_steps for output in mine)
    num_tokens = sum(output.stats.num_output_tokens for output in mine)
    return Pace(
        way,
        temperature,
        num_tokens / num_steps if num_steps else 0.0,
        statistics.median(1 / own for own, _ in timed) if timed else None,
        statistics.median(other / own for own, other in timed) if timed else None,
        sum(a.token_ids == b.token_ids for a, b in zip(mine, plain, strict=True)),
    )
