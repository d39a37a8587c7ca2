"""specinfer: language models faster, and unchanged, by tree-based speculative inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError, DownloadError, ModelError, RequestError, SpecinferError
from specinfer.outputs import CompletionOutput, GenerationStats, RequestOutput, StreamChunk
from specinfer.sampling_params import SamplingParams
from specinfer.structured_outputs import StructuredOutputsParams
from specinfer.tree import Chain, Expansion, TokenTree, merge

if TYPE_CHECKING:
    from specinfer.llm import LLM

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


def __getattr__(name: str) -> Any:
    """LLM brings torch and transformers, which take seconds: only for who asks for it."""
    if name == "LLM":
        from specinfer.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
