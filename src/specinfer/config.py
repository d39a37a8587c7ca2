"""EngineConfig: everything an engine is told, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from specinfer.errors import ConfigError, check_names

DType = Literal["auto", "bfloat16", "float32"]
Quantize = Literal["int8"]
AUTO_TREE = "auto"
DEFAULT_TREE = AUTO_TREE


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Validated on construction; "auto" and None are resolved once, when the engine is built.

    model: a built-in name, a Hugging Face directory, a .gguf file or a hub name.
    drafts: draft models of the same kinds, "default" for the best that ships for a built-in model, "ngram"
        for prompt lookup; several are merged; none is plain decoding.
    tree: the topology of a draft's tree: "auto" sizes it step by step by measured cost and observed
        acceptance, down to none; text ("3,2,1,1") gives its widths; or a Topology.
    verifier: coupled, multi_step or without_replacement.
    dtype: what weights and K/V are kept in; auto is bfloat16 where that is fast, else float32. In the native
        forward auto leaves weights that a GGUF stores as Q8_0, Q4_0, Q4_1, Q4_K or Q6_K as they are. Drafts'
        are left so with bfloat16, too, and those of other drafts kept in Q8_0.
    quantize: "int8" keeps the target's weights in 8 bits, a scale per 32 inputs (GGUF's Q8_0), and multiplies
        them by rows quantised likewise; native forward only. The quantised model is the target: drafts don't
        change it.
    device: a torch device; auto is cuda where there is one.
    max_num_seqs: requests that run at once. max_model_len: longest prompt and output together, in tokens;
        None is what the model was made for. max_step_tokens: prompt tokens computed per step.
    kv_memory: bytes of K/V for the target and its drafts together; None is enough for max_model_len tokens,
        and for more up to 1 GiB.
    prefix_cache: keep finished requests' K/V for prompts that begin alike.
    """

    model: str
    drafts: tuple[str, ...] = ()
    tree: str | Any = DEFAULT_TREE
    verifier: str = "coupled"
    dtype: DType = "auto"
    quantize: Quantize | None = None
    device: str = "auto"
    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_step_tokens: int = 256
    kv_memory: int | None = None
    prefix_cache: bool = True

    def __new__(cls, **given: object) -> Self:
        check_names(given, cls, ConfigError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model must be a name or a path", hint='for example "smollm2-135m"')
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"dtype {self.dtype!r} is not one of auto, bfloat16, float32")
        if self.quantize not in (None, "int8"):
            raise ConfigError(f"quantize {self.quantize!r} is not known", hint="use int8, or leave it out")
        for name in ("max_num_seqs", "max_step_tokens"):
            check_positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_memory"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))


def check_positive(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")
