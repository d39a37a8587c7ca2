"""SmolLM2-135M, three times as wide: the same text at the cost of a model of 1.04 billion parameters.

    python benchmarks/widened_model.py DIR

Every dimension is padded with weights that come to nothing: zeros where hidden rows are written, random
numbers elsewhere. The norms' weights make up for the zeros they average over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from specinfer.models.catalog import resolve_model_path
from specinfer.models.gguf import GGUFFile
from specinfer.models.loader import open_checkpoint

WIDER = 3
WRITERS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")
SCALED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def widened(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The weight of the wider model: what the first rows of its output are made of is unchanged."""
    if weight.dim() == 1:
        return torch.cat([weight / WIDER**0.5, torch.zeros((WIDER - 1) * len(weight))]).bfloat16()
    rows = weight.shape[0] * (1 if "embed" in name else WIDER)
    wide = torch.zeros(rows, weight.shape[1] * WIDER, dtype=torch.bfloat16)
    if not name.endswith(WRITERS):
        wide.normal_(std=0.02, generator=generator)
        wide[: weight.shape[0], weight.shape[1] :] = 0
    wide[: weight.shape[0], : weight.shape[1]] = weight
    return wide


def write_widened(directory: Path) -> None:
    """A Hugging Face directory with config, weights in bf16 and tokenizer."""
    path = resolve_model_path("smollm2-135m")
    gguf = GGUFFile(path)
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **gguf.config()}
    config |= {key: WIDER * config[key] for key in SCALED}
    config["rms_norm_eps"] /= WIDER
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {name: widened(name, gguf.get(name).float(), generator) for name in gguf.names()}
    save_file(weights, str(directory / "model.safetensors"), {"format": "pt"})
    tokenizer = open_checkpoint(path).tokenizer()
    assert tokenizer is not None
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "chat_template": gguf.metadata["tokenizer.chat_template"],
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    write_widened(Path(sys.argv[1]))
