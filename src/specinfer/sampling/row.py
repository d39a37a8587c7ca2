"""Row: where a row of logits stands, which is all a sampler may know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.sampling.grammar import Grammar
from specinfer.sampling.processor import Processor
from specinfer.sampling_params import SamplingParams


class Row(NamedTuple):
    """One row of logits, target's or draft's.

    position: absolute position of the token that the row decides (the prompt starts at 0).
    num_prompt_tokens: position minus this is how many tokens were generated before it, path included.
    end_token_ids: tokens that end the request (none with ignore_eos, save the request's own stop tokens).
    history: committed tokens, prompt and root included; path: tree tokens below the root, this node's last.
    processors: what edits the request's logits before the temperature, in order.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    history: Sequence[int]
    path: tuple[int, ...] = ()
    processors: tuple[Processor, ...] = ()

    def after(self, path: tuple[int, ...]) -> Row:
        """The row that follows `path` below this one's."""
        return self._replace(position=self.position + len(path), path=(*self.path, *path))

    @property
    def grammar(self) -> Grammar | None:
        """The request's grammar, if it has one: it comes before all other processors."""
        first = self.processors[0] if self.processors else None
        return first if isinstance(first, Grammar) else None

    @property
    def noise_key(self) -> tuple[int, int, int]:
        """(seed, sample index, position): everything a noise row depends on."""
        return (self.seed, self.sample_index, self.position)
