"""Grammars: what requests ask of their outputs' form, compiled by llguidance for one tokenizer."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from specinfer.errors import RequestError
from specinfer.models.tokenizer import Tokenizer
from specinfer.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64
"""Compiled grammars that are kept for the next request."""


class Grammars:
    """Compiles once what is asked for often. The first one loads the library and the vocabulary (0.5 s)."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(MAX_KEPT)(self._compile)

    def matcher(self, wanted: StructuredOutputsParams) -> LLMatcher:
        """A matcher of the caller's own, at the start of its grammar. Raises RequestError naming the field
        that cannot be compiled."""
        return self._compiled(wanted).deep_copy()

    def _compile(self, wanted: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        field = f"structured_outputs.{wanted.kind}"
        try:
            grammar = grammar_text(wanted)
        except ValueError as error:
            raise RequestError(f"{field} cannot be compiled: {error}") from None
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        is_empty = not matcher.is_error() and not any(matcher.compute_bitmask())
        if matcher.is_error():
            raise RequestError(f"{field} cannot be compiled: {' '.join(matcher.get_error().split())}")
        if is_empty:
            raise RequestError(f"{field} allows no text that this model can write")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise RequestError("structured_outputs need a tokenizer")
        if not self._tokenizer.eos_token_ids:
            raise RequestError("structured_outputs need an end token, and the tokenizer has none")
        try:
            return LLTokenizer(self._tokenizer.to_json(), eos_token=list(self._tokenizer.eos_token_ids))
        except ValueError as error:
            raise RequestError(f"structured_outputs do not know this tokenizer: {error}") from None


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """In llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    match wanted.kind:
        case "json" | "json_object":
            options: Any = {}
            if wanted.disable_any_whitespace:
                options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            schema = wanted.json if wanted.json is not None else {"type": "object"}
            return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(str(wanted.regex))
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice or ())
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case _:
            return grammar_from("grammar", str(wanted.grammar))
