"""Passages of the target's own, and what it is asked about them. To answer is to copy out of texts full of
names, which neither other prompts that are built in nor its own questions teach."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice

from specinfer.distill.answers import AnswerFile, Job, fits, write_answers
from specinfer.distill.prompts import Prompt
from specinfer.distill.seeds import Grammar
from specinfer.llm import LLM

TEMPERATURE = 0.9
MAX_TOKENS = 400
PLACE = "\0"
"""Of a passage in a prompt."""


def own_passages(
    llm: LLM, count: int, seed: int, file: AnswerFile, *, max_num_seqs: int, quiet: bool
) -> list[Prompt]:
    """Prompts about the passages, at most `count` of them, that the target writes where its context has room.
    They depend on the target, `count` and the seed alone. The target has a chat template. Raises Interrupted
    after Ctrl-C: what is in `file` is not lost."""
    asked = islice(Grammar.built_in("passages").prompts(seed), count)
    ids = [prompt.token_ids(llm.tokenizer, True) for prompt in asked]
    todo = [
        Job(number, "passage", TEMPERATURE, seed + number, one)
        for number, one in enumerate(ids)
        if fits(llm, one, MAX_TOKENS)
    ]
    written = write_answers(
        llm, todo, file, max_tokens=MAX_TOKENS, max_num_seqs=max_num_seqs, quiet=quiet, what="passages"
    )
    ends = llm.tokenizer.eos_token_ids
    answers = (written[job.index].answer for job in todo)
    texts = [llm.tokenizer.decode([t for t in answer if t not in ends]) for answer in answers]
    return readings([text.replace(PLACE, "").strip() for text in texts], seed)


def readings(passages: Sequence[str], seed: int) -> list[Prompt]:
    """Prompts about passages, the kinds in turn. Each passage stands in one: in two, one of which is held
    out, it would be known."""
    grammar = Grammar.built_in("readings", written=[PLACE])
    rng = random.Random(seed)
    left = [passage for passage in reversed(passages) if passage]
    prompts: list[Prompt] = []
    kinds = cycle(grammar.kinds)
    while left:
        kind = next(kinds)
        text = grammar.fill(rng.choice(grammar.kinds[kind]), rng)
        while PLACE in text and left:
            text = text.replace(PLACE, left.pop(), 1)
        prompts.append(Prompt.of_turns(kind, [text.replace(PLACE, "")]))
    return prompts
