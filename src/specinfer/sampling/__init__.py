"""Sampling: noise, processors, the target's choice and a draft's picks. Knows rows, never a tree."""

from specinfer.sampling.chooser import Chooser
from specinfer.sampling.logprobs import token_logprobs
from specinfer.sampling.noise import NoiseCache, NoiseKey, gumbel
from specinfer.sampling.pick import draw_iid, draw_without_replacement, pick_top
from specinfer.sampling.pipeline import make_processors, process
from specinfer.sampling.processor import Processor
from specinfer.sampling.row import Row
from specinfer.sampling.streams import Purpose, stream

__all__ = [
    "Chooser",
    "NoiseCache",
    "NoiseKey",
    "Processor",
    "Purpose",
    "Row",
    "draw_iid",
    "draw_without_replacement",
    "gumbel",
    "token_logprobs",
    "make_processors",
    "pick_top",
    "process",
    "stream",
]
