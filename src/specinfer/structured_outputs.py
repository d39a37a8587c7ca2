"""What a request asks of its output's form. Names and meanings follow vLLM's StructuredOutputsParams."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from specinfer.errors import RequestError, check_names

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output, in one of these ways; validated on construction, compiled by the engine.

    json: a JSON schema, as a mapping or as text. Kept as text.
    json_object: any JSON object.
    regex: a regular expression (Rust's syntax) that the whole output matches.
    choice: one of these texts.
    grammar: a context-free grammar in llguidance's Lark, rule `start`, or in llama.cpp's GBNF, rule `root`.
    disable_any_whitespace: JSON is written as `json.dumps` does by default, all on one line. Without it any
        white space may stand between the parts, as much as there is room for.

    Raises RequestError naming the field.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __new__(cls, **given: object) -> Self:
        check_names(given, cls, RequestError, "structured_outputs.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"structured_outputs.{name} must be True or False, got {getattr(self, name)!r}"
                )
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'none'} of {', '.join(KINDS)}",
                hint="give exactly one of them",
            )
        if self.json is not None:
            object.__setattr__(self, "json", as_schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", as_choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"structured_outputs.{name} must be a text, got {value!r:.80}")

    @property
    def kind(self) -> str:
        """The one of KINDS that was given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @staticmethod
    def of(value: object) -> StructuredOutputsParams:
        """From itself, or from a mapping of its fields. Raises RequestError."""
        if isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs must map one of {', '.join(KINDS)}, got {value!r:.80}")
        return StructuredOutputsParams(**{str(name): given for name, given in value.items()})


def as_schema(value: object) -> str:
    """A JSON schema as text. Raises RequestError."""
    try:
        schema = jsonlib.loads(value) if isinstance(value, str) else value
        text = jsonlib.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise RequestError(f"structured_outputs.json must be a JSON schema, an object, got {value!r:.80}")
    return text


def as_choices(value: object) -> tuple[str, ...]:
    """Raises RequestError."""
    choices = () if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(f"structured_outputs.choice must be a list of non-empty texts, got {value!r:.80}")
    return choices
