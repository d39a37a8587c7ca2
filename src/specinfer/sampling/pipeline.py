"""The pipeline: what a request's parameters do to its logits, and in which order.

0. structured_outputs                                     wins where 1 leaves nothing of what it allows
1. allowed_token_ids, bad_words, min_tokens, logit_bias   by token; bans commute, a bias moves what remains
2. repetition, frequency, presence penalty                see biased logits, and scale a ban to a ban
3. temperature                                            what stands above is independent of it
4. min_p, top_k, top_p, typical_p                         each among what the one before it left

This is vLLM's order, with typical_p last as in transformers. 0 to 2 can change the likeliest token, so they
hold at temperature 0 too; 3 and 4 cannot, or are not meant to, and are left out there. Target and drafts go
through the same pipeline, each row along its own path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specinfer.sampling.filters import Filters
from specinfer.sampling.grammar import Grammar, Matcher
from specinfer.sampling.penalties import Penalties
from specinfer.sampling.processor import Processor
from specinfer.sampling.row import Row
from specinfer.sampling.token_rules import AllowedTokens, BadWords, LogitBias, MinTokens
from specinfer.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this one act as this one: logits divided by less leave the range of fp32."""


def make_processors(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    end_token_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
    vocab_size: int,
    matcher: Matcher | None = None,
) -> tuple[Processor, ...]:
    """One request's processors, steps 0 to 2; none for parameters that edit nothing.

    bad_words: each as tokens, at least one. vocab_size: the target's; the token ids in params are below it.
    matcher: of params.structured_outputs, the request's own.
    """
    processors: list[Processor] = []
    if params.allowed_token_ids is not None:
        processors.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if possible := [word for word in bad_words if max(word) < vocab_size]:
        processors.append(BadWords(possible, num_prompt_tokens))
    ends = [token for token in end_token_ids if token < vocab_size]
    if params.min_tokens and ends:
        processors.append(MinTokens(ends, params.min_tokens, num_prompt_tokens))
    if params.logit_bias:
        processors.append(LogitBias(params.biases))
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if penalties != (1.0, 0.0, 0.0):
        processors.append(Penalties(*penalties, num_prompt_tokens))
    if matcher is not None:
        grammar = Grammar(
            matcher,
            processors,
            end_token_ids=ends,
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=vocab_size,
        )
        return (grammar,)
    return tuple(processors)


def process(
    logits: torch.Tensor,
    rows: Sequence[Row],
    token_ids: torch.Tensor | None = None,
    num_tokens: int | None = None,
) -> torch.Tensor:
    """logits: [n, V] of any float type, never written to; rows: [n]. Returns [n, V] fp32, -inf where a token
    is excluded; it may be `logits` itself when nothing is to be done.

    token_ids: [V], the target's token id of each column, for a draft that has a subset of its vocabulary;
    num_tokens: the size of that vocabulary. A filter that ends among equals keeps the lowest ids.
    """
    edited = [i for i, row in enumerate(rows) if row.processors]
    divisors = [divisor(row) for row in rows]
    if not edited and all(d == 1.0 for d in divisors):
        out = logits.float()
    else:
        out = logits.to(torch.float32, copy=True)
        for i in edited:
            _edit(out[i], rows[i], token_ids, num_tokens)
        if any(d != 1.0 for d in divisors):
            # A tensor, since division by a number may become multiplication by its reciprocal.
            out.div_(torch.tensor(divisors, dtype=torch.float32).unsqueeze(1).to(out.device))
    groups: dict[Filters, list[int]] = {}
    for i, row in enumerate(rows):
        if is_sampled(row) and (filters := Filters.of(row.params, out.shape[1])) is not None:
            groups.setdefault(filters, []).append(i)
    for filters, members in groups.items():
        if len(members) == len(rows):
            return filters.apply(out)
        if out is logits:
            out = out.clone()
        out[members] = filters.apply(out[members])
    return out


def is_sampled(row: Row) -> bool:
    """Whether chance has a part in this row."""
    return row.params.temperature > 0.0


def divisor(row: Row) -> float:
    """What the row's logits are divided by."""
    return max(row.params.temperature, MIN_TEMPERATURE) if is_sampled(row) else 1.0


def is_only_divided(row: Row, num_tokens: int) -> bool:
    """Whether the temperature is all that `process` looks at."""
    return not row.processors and (not is_sampled(row) or Filters.of(row.params, num_tokens) is None)


def _edit(logits: torch.Tensor, row: Row, token_ids: torch.Tensor | None, num_tokens: int | None) -> None:
    """Run the row's processors over its logits, in place.

    Where they leave a draft none of its tokens, its row stays as it was: whatever it proposes is refused.
    """
    full = logits
    if token_ids is not None:
        assert num_tokens is not None
        full = logits.new_full((num_tokens,), -torch.inf)
        full[token_ids] = logits
    for processor in row.processors:
        processor.apply(full, row.history, row.path)
    if token_ids is not None:
        part = full[token_ids]
        if bool(part.max() > -torch.inf):
            logits.copy_(part)
