"""Sampling fields of a request body, and the SamplingParams they stand for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.service import Service

MAX_STOPS = 64
MAX_LIST = 1024
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    """A JSON object with no other fields than these, of no other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Speculation(Body):
    """Our extension of OpenAI's interface: whether to speculate, and whether the answer tells how it went."""

    enabled: bool = True
    statistics: bool = False


class SamplingFields(Body):
    """OpenAI's sampling fields and vLLM's; what is null or left out has SamplingParams' default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_LIST)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LIST)] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_LIST)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    priority: int = 0
    ttft: float | None = None
    tpot: float | None = None
    speculation: Speculation = Speculation()

    def sampling_params(self, **others: Any) -> SamplingParams:
        """others: what a kind of request calls by another name; None is left out.

        Raises RequestError.
        """
        names = SamplingFields.model_fields.keys() - Service.__dataclass_fields__.keys()
        wanted = {name: getattr(self, name) for name in names} | others
        wanted = {name: value for name, value in wanted.items() if value is not None}
        if "seed" in wanted:
            wanted["seed"] %= 2**64
        if "logit_bias" in wanted:
            wanted["logit_bias"] = {token_id(key): bias for key, bias in wanted["logit_bias"].items()}
        return SamplingParams(**wanted)

    def service(self) -> Service:
        """How the scheduler is to treat it. Raises RequestError."""
        return Service(
            priority=self.priority, ttft=self.ttft, tpot=self.tpot, speculation=self.speculation.enabled
        )


def token_id(key: str) -> int:
    """The token id that a key of logit_bias writes. Raises RequestError."""
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise RequestError(f"logit_bias: {key!r:.40} is no token id")
    return int(key)
