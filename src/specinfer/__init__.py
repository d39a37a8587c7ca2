"""specinfer: language models faster, and unchanged, by tree-based speculative inference."""

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError, DownloadError, ModelError, RequestError, SpecinferError
from specinfer.llm import LLM
from specinfer.outputs import CompletionOutput, GenerationStats, RequestOutput, StreamChunk
from specinfer.sampling_params import SamplingParams
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
    "TokenTree",
    "merge",
]
