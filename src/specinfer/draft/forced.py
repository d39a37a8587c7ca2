"""Forced tokens: where a grammar leaves one token, it is a node of the tree without any drafting."""

from __future__ import annotations

from dataclasses import replace

from specinfer.draft.drafter import DraftContext, Proposal
from specinfer.draft.growth import CERTAIN
from specinfer.sampling.row import Row
from specinfer.tree import Candidate, TokenTree

LIKELY = 0.5
"""Forced tokens below a drafted leaf are always right, but only of use where the leaf is: they are added to
leaves at least this likely."""


def forced_tokens(row: Row, limit: int) -> tuple[int, ...]:
    """Up to `limit` tokens after the row's path, each the only one that the request's grammar allows."""
    tokens: tuple[int, ...] = ()
    if row.grammar is None:
        return tokens
    while len(tokens) < limit:
        token = row.grammar.forced(row.history, (*row.path, *tokens))
        if token is None:
            break
        tokens = (*tokens, token)
    return tokens


def below(context: DraftContext, chain: tuple[int, ...], max_nodes: int) -> DraftContext:
    """What a drafter sees that goes on below the chain; max_nodes: of its own tree."""
    if not chain and context.max_nodes <= max_nodes:
        return context
    if not chain:
        return replace(context, max_nodes=max_nodes)
    is_over = chain[-1] in context.row.end_token_ids
    return replace(
        context,
        tokens=[*context.tokens, *chain],
        row=context.row.after(chain),
        max_depth=0 if is_over else context.max_depth - len(chain),
        max_nodes=min(context.max_nodes - len(chain), max_nodes),
    )


def graft(context: DraftContext, chain: tuple[int, ...], proposal: Proposal, max_forced: int) -> Proposal:
    """One tree below the context's root: the chain, a proposal made below it, and what is forced below that.

    max_forced: the most forced tokens, chain included. They go to likely leaves only.
    """
    if context.row.grammar is None:
        return proposal
    drafted, shift = proposal.tree, len(chain)
    token_ids = [int(context.tokens[-1]), *chain, *drafted.token_ids[1:].tolist()]
    parents = [*range(-1, shift), *(drafted.parents[1:] + shift).tolist()]
    scores = [CERTAIN] * (1 + shift) + drafted.scores[1:].tolist()
    room = min(max_forced - shift, context.max_nodes - len(token_ids))
    likelihood = drafted.scores.copy()
    for node in range(1, drafted.num_nodes):
        likelihood[node] *= likelihood[drafted.parents[node]]
        if not drafted.children[node] and likelihood[node] >= LIKELY:
            path = (*chain, *drafted.path_tokens(node))
            tail = forced_tokens(context.row.after(path), min(room, context.max_depth - len(path)))
            room -= len(tail)
            parents += [node + shift, *range(len(token_ids), len(token_ids) + len(tail) - 1)][: len(tail)]
            token_ids += tail
            scores += [CERTAIN] * len(tail)
    if len(token_ids) == drafted.num_nodes:
        return proposal
    candidates = [Candidate(c.node + shift, *c[1:]) for c in drafted.candidates]
    tree = TokenTree.build(token_ids, parents, scores, candidates)
    law = {
        (drafter, tree.places[*chain, *drafted.path_tokens(node)]): q
        for (drafter, node), q in proposal.law.items()
    }
    return Proposal(tree, law)
