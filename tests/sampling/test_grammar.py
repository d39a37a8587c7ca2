"""A grammar's tokens, wherever its matcher stood before, against a fresh matcher for every path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.engine.grammars import Grammars
from specinfer.models.tokenizer import Tokenizer
from specinfer.sampling.grammar import Grammar, Matcher
from specinfer.sampling.processor import Processor
from specinfer.sampling.token_rules import AllowedTokens, MinTokens
from specinfer.structured_outputs import StructuredOutputsParams

VOCAB, END = 310, 257  # ten columns more than the tokenizer has tokens
PROMPT = [5, 70, 257, 6]
A, B, C = 64, 65, 66
FORMS = [
    {"regex": "(abc|abd)+(ab)?"},
    {"grammar": 'root ::= "a" root "b" | "c"'},
    {"choice": ["abc", "abd", "a", 'say "ä"\n']},
    {"json": {"type": "array", "items": {"enum": [1, 12, "a"]}}, "disable_any_whitespace": True},
]


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> Grammars:
    return Grammars(Tokenizer.from_directory(tiny_model))


def make(matcher: Matcher, others: Sequence[Processor] = (), ends: Sequence[int] = (END, 999)) -> Grammar:
    return Grammar(matcher, others, end_token_ids=ends, num_prompt_tokens=len(PROMPT), vocab_size=VOCAB)


def allowed(grammar: Grammar, history: Sequence[int], path: Sequence[int]) -> list[int] | None:
    banned = grammar.banned(history, path)
    return None if banned is None else np.flatnonzero(~banned.numpy()).tolist()


def reference(matcher: Matcher, tokens: Sequence[int]) -> list[int] | None:
    if END in tokens or matcher.try_consume_tokens(list(tokens)) < len(tokens):
        return None
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:300]).tolist()


@settings(max_examples=40)
@given(data=st.data(), form=st.sampled_from(FORMS))
def test_any_order_of_nodes(grammars: Grammars, data: st.DataObject, form: dict[str, object]) -> None:
    """Random walks through paths, allowed and not, while the history grows."""
    wanted = StructuredOutputsParams.of(form)
    grammar, history = make(grammars.matcher(wanted)), list(PROMPT)
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 6))):
            path: list[int] = []
            for _ in range(data.draw(st.integers(0, 5))):
                known = reference(grammars.matcher(wanted), history[len(PROMPT) :] + path) or []
                path.append(data.draw(st.sampled_from([*known, *known, A, C, 299, END])))
            expected = reference(grammars.matcher(wanted), history[len(PROMPT) :] + path)
            assert allowed(grammar, history, path) == expected
            only = expected[0] if expected is not None and len(expected) == 1 else None
            assert grammar.forced(history, path) == only
        for _ in range(data.draw(st.integers(0, 3))):
            known = reference(grammars.matcher(wanted), history[len(PROMPT) :]) or []
            history += [data.draw(st.sampled_from([token for token in known if token != END] or [END]))]
            if history[-1] == END:
                return


def test_ends_where_the_grammar_may(grammars: Grammars) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="ab?c?"))
    grammar = make(matcher, ends=(END, C, 298))
    assert allowed(grammar, PROMPT, ()) == [A]
    assert allowed(grammar, PROMPT, (A,)) == [B, C, END, 298]
    assert allowed(grammar, PROMPT, (A, B)) == [C, END, 298]
    assert allowed(grammar, PROMPT, (A, B, C)) is None, "a stop token that is text ends, too"


def test_other_processors_come_after_it_and_never_leave_nothing(grammars: Grammars) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="a[bc]"))
    others = (AllowedTokens([B, 7], VOCAB), MinTokens([END], 5, len(PROMPT)))
    grammar = make(matcher, others)
    for path, expected in (((), [A]), ((A,), [B]), ((A, C), [END])):
        logits = torch.arange(VOCAB, dtype=torch.float32)
        grammar.apply(logits, PROMPT, path)
        assert torch.isfinite(logits).nonzero().flatten().tolist() == expected, path
    logits = torch.zeros(VOCAB)
    grammar.apply(logits, PROMPT, (B,))
    assert bool((logits == 0).all()), "nothing is said about what cannot be reached"


class Fragile:
    """A matcher whose limits give way at its second token: when it takes it, or when it looks beyond."""

    def __init__(self, fails_early: bool) -> None:
        self.tokens: list[int] = []
        self.fails_early = fails_early
        self.failed = False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.failed = self.fails_early and len(self.tokens) + len(tokens) > 1
        if self.failed:
            return 0
        self.tokens += tokens
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        assert not self.failed
        del self.tokens[len(self.tokens) - num_tokens :]
        return True

    def compute_bitmask(self) -> bytes:
        self.failed = len(self.tokens) > 1
        return bytes([255] * 2)

    def is_accepting(self) -> bool:
        return False

    def is_error(self) -> bool:
        return self.failed

    def deep_copy(self) -> Fragile:
        return Fragile(self.fails_early)


@pytest.mark.parametrize("fails_early", [False, True])
def test_what_cannot_be_followed_ends_there_and_only_there(fails_early: bool) -> None:
    grammar = make(Fragile(fails_early))
    for path in ((), (A, B), (A,), (A, B), ()):
        expected = [END] if len(path) > 1 else list(range(16))
        assert allowed(grammar, PROMPT, path) == expected
    assert allowed(grammar, [*PROMPT, A], ()) == list(range(16))
