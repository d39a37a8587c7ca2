"""Tree attention over slots."""

from specinfer.attention.backend import AttentionBackend
from specinfer.attention.span import Span
from specinfer.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "Span", "TorchAttention"]
