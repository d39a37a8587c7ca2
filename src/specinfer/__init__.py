"""specinfer: language models faster, and unchanged, by tree-based speculative inference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specinfer.config import EngineConfig
    from specinfer.errors import ConfigError, DownloadError, ModelError, RequestError, SpecinferError
    from specinfer.llm import LLM
    from specinfer.outputs import CompletionOutput, GenerationStats, RequestOutput, StreamChunk
    from specinfer.sampling_params import SamplingParams
    from specinfer.structured_outputs import StructuredOutputsParams
    from specinfer.tree import Chain, Expansion, TokenTree, merge

__all__ = [
    "LLM",
    "Chain",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "EngineConfig",
    "Expansion",
    "GenerationStats",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpecinferError",
    "StreamChunk",
    "StructuredOutputsParams",
    "TokenTree",
    "merge",
]

_LIGHTEST_FIRST = ("errors", "config", "outputs", "structured_outputs", "sampling_params", "tree", "llm")


def __getattr__(name: str) -> Any:
    """Only what is asked for is imported: trees bring numpy, LLM brings torch, which takes seconds."""
    if name in __all__:
        for module in (import_module(f"specinfer.{module}") for module in _LIGHTEST_FIRST):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
