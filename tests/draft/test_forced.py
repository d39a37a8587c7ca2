"""Forced tokens: where they hang, and what a drafter's own nodes become among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.forced import below, forced_tokens, graft
from specinfer.engine.grammars import Grammars
from specinfer.models.tokenizer import Tokenizer
from specinfer.sampling import Row, make_processors
from specinfer.sampling_params import SamplingParams
from specinfer.tree import Candidate, CandidateKind, TokenTree

END = 257
A, B, C, D, E, F, G, H = range(64, 72)
PROMPT = [1, 2]


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> Grammars:
    return Grammars(Tokenizer.from_directory(tiny_model))


def context(grammars: Grammars, regex: str, max_depth: int = 20, max_nodes: int = 20) -> DraftContext:
    params = SamplingParams(structured_outputs={"regex": regex})
    assert params.form is not None
    processors = make_processors(
        params,
        num_prompt_tokens=2,
        end_token_ids=(END,),
        bad_words=(),
        vocab_size=300,
        matcher=grammars.matcher(params.form),
    )
    row = Row(params, 0, 0, 2, 2, (END,), PROMPT, (), processors)
    return DraftContext(PROMPT, np.array([9]), row, max_depth, max_nodes)


def test_a_chain_ends_where_there_is_a_choice_or_no_more(grammars: Grammars) -> None:
    row = context(grammars, "abc(d|e)f").row
    assert forced_tokens(row, 9) == (A, B, C)
    assert forced_tokens(row, 2) == (A, B)
    assert forced_tokens(context(grammars, "ab").row, 9) == (A, B, END)
    assert forced_tokens(context(grammars, "ab?").row, 9) == (A,)
    assert forced_tokens(Row(SamplingParams(), 0, 0, 2, 2, (), PROMPT), 9) == ()


def test_a_drafter_goes_on_below_the_chain(grammars: Grammars) -> None:
    whole = context(grammars, "abc(d|e)f")
    rest = below(whole, (A, B, C), 5)
    assert list(rest.tokens) == [*PROMPT, A, B, C] and rest.slots is whole.slots
    assert (rest.row.position, rest.row.path, rest.row.history) == (5, (A, B, C), PROMPT)
    assert (rest.max_depth, rest.max_nodes) == (17, 5)
    assert below(whole, (A, B, END), 5).max_depth == 0, "nothing grows below an end"


def test_nodes_candidates_and_laws_keep_their_places(grammars: Grammars) -> None:
    """Two draws below the chain, the likelier one second: it is stored first, with what it forces."""
    kind = CandidateKind.IID
    tree = TokenTree.build(
        [C, D, E, G], [-1, 0, 0, 1], [1.0, 0.3, 0.6, 0.9], [Candidate(i, 0, i - 1, kind) for i in (1, 2)]
    )
    at_root, at_d = np.full(300, 1 / 300), np.full(300, 2 / 300)
    law = {(0, 0): at_root, (0, tree.child(0, D) or 0): at_d}
    whole = context(grammars, "abc(d(g|h)|ef)a")
    grafted, laws = graft(whole, (A, B, C), Proposal(tree, law), 16)
    paths = [grafted.path_tokens(node) for node in range(grafted.num_nodes)]
    assert paths[:4] == [(), (A,), (A, B), (A, B, C)]
    assert paths[4:8] == [(A, B, C, E, *tail) for tail in ((), (F,), (F, A), (F, A, END))]
    assert paths[8:] == [(A, B, C, D), (A, B, C, D, G)], "an unlikely leaf gets no tail"
    drawn = {paths[c.node]: c.draw for c in grafted.candidates if c.kind == kind}
    assert drawn == {(A, B, C, D): 0, (A, B, C, E): 1}
    assert {(drafter, paths[node]) for drafter, node in laws} == {(0, (A, B, C)), (0, (A, B, C, D))}
    assert laws[0, 3] is at_root and laws[0, 8] is at_d


@pytest.mark.parametrize(("max_depth", "max_nodes", "max_forced"), [(6, 20, 16), (20, 8, 16), (20, 20, 5)])
def test_limits(grammars: Grammars, max_depth: int, max_nodes: int, max_forced: int) -> None:
    tree = TokenTree.build([C, E], [-1, 0], [1.0, 0.9], [])
    whole = context(grammars, "abc(d(g|h)|ef)abcdefgh", max_depth, max_nodes)
    grafted, _ = graft(whole, (A, B, C), Proposal(tree, {}), max_forced)
    assert grafted.max_depth == min(max_depth, max_nodes - 1, max_forced + 1)
    assert grafted.num_nodes <= max_nodes


def test_nothing_forced_is_nothing_changed(grammars: Grammars) -> None:
    proposal = Proposal(TokenTree.build([2, A], [-1, 0], [1.0, 0.9], []), {})
    assert graft(context(grammars, "[ab][cd]+"), (), proposal, 16) is proposal
