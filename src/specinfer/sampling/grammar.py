"""Grammar: the tokens that keep an output within its grammar, along any path of a tree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.sampling.processor import Processor

logger = logging.getLogger("specinfer")


class Matcher(Protocol):
    """A compiled grammar and how far an output is in it: what we use of llguidance's LLMatcher.

    It never raises; in an error it stays. `compute_bitmask`: a bit for each token, lowest bit first.
    """

    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def deep_copy(self) -> Matcher: ...


class Grammar:
    """Leaves the tokens that the grammar allows, and all that end the request where the grammar may end.

    The request's other processors come after it. Where they ban all that it allows, they are not heard: there
    is always a token, and what comes out is always in the grammar.

    One matcher follows the history; for a node it goes down the node's path, and back only as far as the next
    node asks. A node's tokens are worked out once, for drafts and target alike.
    """

    def __init__(
        self,
        matcher: Matcher,
        others: Sequence[Processor],
        *,
        end_token_ids: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
    ) -> None:
        """matcher: at the start of its grammar; nobody else moves it."""
        self._start = matcher
        self._others = tuple(others)
        self._ends = sorted({token for token in end_token_ids if token < vocab_size})
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._banned: dict[tuple[int, ...], torch.Tensor | None] = {}
        self._rewind()

    def apply(self, logits: torch.Tensor, history: Sequence[int], path: Sequence[int]) -> None:
        banned = self.banned(history, path)
        if banned is None:
            return
        logits.masked_fill_(banned.to(logits.device), -torch.inf)
        if not self._others:
            return
        allowed = logits.clone()
        for processor in self._others:
            processor.apply(logits, history, path)
        if not bool(logits.max() > -torch.inf):
            logits.copy_(allowed)

    def forced(self, history: Sequence[int], path: Sequence[int]) -> int | None:
        """The only token allowed after `path`, if there is just one."""
        banned = self.banned(history, path)
        if banned is None:
            return None
        allowed = np.flatnonzero(~banned.numpy())
        return int(allowed[0]) if len(allowed) == 1 else None

    def banned(self, history: Sequence[int], path: Sequence[int]) -> torch.Tensor | None:
        """[V] bool on the CPU; None behind tokens that the grammar does not allow, or an end: no output gets
        there."""
        if len(history) != self._num_known:
            self._banned.clear()
        key = tuple(path)
        if key not in self._banned:
            self._banned[key] = self._find_banned(history, key)
        return self._banned[key]

    def _find_banned(self, history: Sequence[int], path: tuple[int, ...]) -> torch.Tensor | None:
        if not set(path).isdisjoint(self._ends):
            return None
        self._follow(history)
        if not self._go_to(path) and not self._matcher.is_error():
            return None
        banned: NDArray[np.bool_] = np.ones(self._vocab_size, np.bool_)
        is_accepting = self._matcher.is_accepting()
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            logger.warning("a grammar has become too complex to follow: its output ends here")
            self._rewind()
        else:
            bits = np.frombuffer(mask, np.uint8)
            known = np.unpackbits(bits, count=min(8 * len(bits), self._vocab_size), bitorder="little")
            np.logical_not(known, out=banned[: len(known)])
        if is_accepting or banned.all():
            banned[self._ends] = False
        return torch.from_numpy(banned)

    def _rewind(self) -> None:
        """To the end of the prompt, with a matcher that nothing has happened to."""
        self._matcher = self._start.deep_copy()
        self._num_known = self._num_prompt_tokens
        self._path: tuple[int, ...] = ()

    def _follow(self, history: Sequence[int]) -> None:
        """Take what has been committed."""
        if len(history) == self._num_known:
            return
        self._matcher.rollback(len(self._path))
        self._path = ()
        new = [int(token) for token in history[self._num_known :]]
        taken = self._matcher.try_consume_tokens(new)
        assert taken == len(new) or self._matcher.is_error(), "what was committed is not in the grammar"
        self._num_known = len(history)

    def _go_to(self, path: tuple[int, ...]) -> bool:
        """Move from the last node to this one; False where the grammar does not allow its tokens."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._matcher.rollback(len(self._path) - common)
        taken = self._matcher.try_consume_tokens(list(path[common:]))
        self._path = path[: common + taken]
        return self._path == path
