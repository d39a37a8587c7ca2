"""Passages of the target's own, and what it is asked about them. To answer is to copy out of texts full of
names, which neither other prompts that are built in nor its own questions teach."""

from __future__ import annotations

import re
from itertools import islice

from specinfer.distill.answers import AnswerFile, Job, fits, write_answers
from specinfer.distill.prompts import Prompt
from specinfer.distill.seeds import Grammar
from specinfer.llm import LLM

TEMPERATURE = 0.9
MAX_TOKENS = 400
PROMPTS_PER_PASSAGE = 2
MEANS_SOMETHING = re.compile(r"[{}]|----")
"""To a Grammar, which is to fill templates with the passages."""


def own_passages(
    llm: LLM, count: int, seed: int, file: AnswerFile, *, max_num_seqs: int, quiet: bool
) -> list[Prompt]:
    """About `count` passages that the target writes, as far as its context has room; they depend on the
    target and the seed alone. It has a chat template. Raises Interrupted after Ctrl-C: what is in `file` is
    not lost."""
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
    texts = [llm.tokenizer.decode([t for t in answer if t not in ends]).strip() for answer in answers]
    kept = [text for text in texts if text and not MEANS_SOMETHING.search(text)]
    if not kept:
        return []
    readings = Grammar.built_in("readings", written=kept).prompts(seed)
    return list(islice(readings, PROMPTS_PER_PASSAGE * len(kept)))
