"""Ways to answer a prompt, ours and others', behind one signature."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Sample:
    """One way's answer to one prompt."""

    tokens_per_second: float
    acceptance_length: float
    milliseconds_per_step: dict[str, float]
    tokens: tuple[int, ...]


Way = Callable[[list[int], int], Sample]


def transformers_way(dtype: torch.dtype) -> Way:
    """transformers' own generate on the same weights, greedy, through its own cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specinfer.models.catalog import resolve_model_path
    from specinfer.models.gguf import GGUFFile

    gguf = GGUFFile(resolve_model_path("smollm2-135m"))
    config = LlamaConfig(**gguf.config())
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: gguf.get(name).to(dtype) for name in gguf.names()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    rope = config.rope_parameters["rope_theta"]
    inverse = 1.0 / (rope ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim))
    model.model.rotary_emb.inv_freq = inverse
    model.model.rotary_emb.original_inv_freq = inverse
    model.eval()

    class Clock:
        """A streamer that notes when tokens come."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def answer(prompt: list[int], max_tokens: int) -> Sample:
        clock = Clock()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=2,
                eos_token_id=2,
                streamer=clock,
            )
        # The first call hands over the prompt.
        first, last = clock.times[1], clock.times[-1]
        n = len(clock.times) - 1
        speed = (n - 1) / (last - first) if n > 1 else float("nan")
        return Sample(speed, 1.0, {}, tuple(out[0, len(prompt) :].tolist()))

    return answer
