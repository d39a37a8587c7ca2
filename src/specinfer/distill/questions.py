"""Questions of the target's own: it writes in the user's place, as users did where it learnt (Magpie, Xu et
al. 2024). They are as broad as what it was made for."""

from __future__ import annotations

from itertools import takewhile

from specinfer.distill.answers import AnswerFile, Job, write_answers
from specinfer.distill.prompts import Prompt
from specinfer.llm import LLM
from specinfer.models.tokenizer import Tokenizer

TEMPERATURE = 0.8
MAX_TOKENS = 256


def user_turn(tokenizer: Tokenizer) -> list[int]:
    """What stands before a user's words in a conversation's first turn: what two of them have in common."""
    one, other = (tokenizer.apply_chat_template([{"role": "user", "content": word}]) for word in ("0", "x"))
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def own_questions(
    llm: LLM, count: int, seed: int, file: AnswerFile, *, max_num_seqs: int, quiet: bool
) -> list[Prompt]:
    """Of `count` texts those that came to an end, each once; they depend on the target and the seed alone.
    The target has a chat template. Raises Interrupted after Ctrl-C: what is in `file` is not lost."""
    start = user_turn(llm.tokenizer)
    todo = [Job(number, "own", TEMPERATURE, seed + number, start) for number in range(count)]
    written = write_answers(
        llm, todo, file, max_tokens=MAX_TOKENS, max_num_seqs=max_num_seqs, quiet=quiet, what="asking"
    )
    whole = (written[job.index].answer for job in todo)
    ends = llm.tokenizer.eos_token_ids
    texts = [llm.tokenizer.decode(tokens[:-1]).strip() for tokens in whole if tokens[-1] in ends]
    return [Prompt.of_turns("own", [text]) for text in dict.fromkeys(texts) if text]
