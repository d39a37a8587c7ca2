"""Results as JSON and as one line of statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from specinfer.outputs import CompletionOutput, GenerationStats


def completion_record(output: CompletionOutput) -> dict[str, Any]:
    """JSON of one sample; log probabilities only where they were asked for."""
    record: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "stats": stats_record(output.stats),
    }
    if output.logprobs is not None:
        record["logprobs"] = [
            [{"token_id": token, **found._asdict()} for token, found in one.items()]
            for one in output.logprobs
        ]
    return record


def stats_record(stats: GenerationStats) -> dict[str, Any]:
    """JSON of the statistics, with what follows from the counts."""
    return {
        **asdict(stats),
        "mean_accepted_tokens": stats.mean_accepted_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_depth": stats.acceptance_per_depth,
        "tokens_per_second": tokens_per_second([stats]),
    }


def stats_line(output: CompletionOutput) -> str:
    """For a person."""
    stats = output.stats
    parts = [f"{count(stats.num_output_tokens, 'token')} in {count(stats.num_steps, 'step')}"]
    if stats.num_draft_tokens:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
    speed = tokens_per_second([stats])
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if stats.num_near_ties:
        parts.append(count(stats.num_near_ties, "near-tie"))
    if stats.ttft is not None:
        parts.append(f"first token after {stats.ttft:.2f} s")
    return ", ".join([*parts, f"seed {output.seed}"])


def tokens_per_second(stats: Iterable[GenerationStats]) -> float | None:
    """Decoding speed over several completions: tokens after the first ones, by the time they took."""
    seconds = num_tokens = 0.0
    for s in stats:
        if s.tpot is not None:
            seconds += s.tpot * (s.num_output_tokens - 1)
            num_tokens += s.num_output_tokens - 1
    return num_tokens / seconds if seconds > 0 else None


def count(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
