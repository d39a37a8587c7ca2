"""What a fresh student has from its target: the embedding and the first layers, narrowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.distill.forcing import Text, hidden_rows
from specinfer.llm import LLM
from specinfer.models.config import ModelConfig
from specinfer.models.loader import Checkpoint

NUM_TOKENS = 4096
"""Of which hidden rows are looked at: several for each of their columns."""
SMALLEST_SCALE = 0.05
"""Of a column, as a share of the mean: what it is divided by must not vanish."""


def has_llama_layers(config: ModelConfig) -> bool:
    """Whether a student can begin with the target's layers."""
    return config.model_type == "llama"


def sample_rows(llm: LLM, target: Checkpoint, texts: Sequence[Text], num_layers: int) -> list[torch.Tensor]:
    """[layer] hidden rows [n, width] of the target on its way through NUM_TOKENS tokens: those that each of
    its first `num_layers` layers reads, and those that the last of these leaves; the first alone of a target
    that is no Llama.
    """
    lengths = np.cumsum([len(text.tokens) for text in texts])
    texts = texts[: int(np.searchsorted(lengths, NUM_TOKENS)) + 1]
    tokens = torch.from_numpy(np.concatenate([text.tokens[1:] for text in texts]))
    states = [_weight(target, "embed_tokens")[tokens]]
    if has_llama_layers(target.config):
        layers = range(min(num_layers, target.config.num_layers))
        rows = [hidden_rows(llm, text, layers) for text in texts]
        # A text's first token is where attention rests: its rows are like no other's.
        states += [torch.cat([row[i][1:].float().cpu() for row in rows]) for i in layers]
    return states


@torch.no_grad()
def inherit(
    model: Any, target: Checkpoint, vocab: NDArray[np.int64] | None, states: Sequence[torch.Tensor]
) -> None:
    """Begin a LlamaForCausalLM as the target: with its embedding's rows of `vocab` and, where it is a Llama,
    its first layers: along the principal axes of `states` (`sample_rows` of as many layers or more), of the
    heads and neurons the heaviest. What the target has none of stays as it is.
    """
    states = states[: model.config.num_hidden_layers + 1]
    config, hidden = target.config, model.config.hidden_size
    rows = _weight(target, "embed_tokens")
    rows = rows if vocab is None else rows[torch.from_numpy(vocab)]
    is_tied = has_llama_layers(config) and config.tie_embeddings
    scale = torch.ones(rows.shape[1])
    if is_tied:
        # The last norm's weights meet the head alone. A student's head is its embedding: both get the root.
        last = _weight(target, "norm").abs()
        scale = last.clamp_min(SMALLEST_SCALE * last.mean()).sqrt()
    axes = principal_axes(torch.cat([torch.nn.functional.normalize(x * scale) for x in states]), hidden)
    read, write = axes / scale[:, None], axes * scale[:, None]
    # What a norm divides by: lengths of rows that are narrowed, of fewer numbers.
    lengths = [(x @ write).norm(dim=1).mean() / x.norm(dim=1).mean() for x in states]
    sizes = [length * (rows.shape[1] / hidden) ** 0.5 for length in lengths]
    if not is_tied:
        # An embedding becomes a head: it begins as small as a random one, and all that is added to it.
        write = write * (model.config.initializer_range / (rows @ write).std())
    model.model.embed_tokens.weight[:, : axes.shape[1]] = rows @ write
    if not has_llama_layers(config):
        return
    model.model.norm.weight.fill_(sizes[-1])
    for i, (layer, x, size) in enumerate(zip(model.model.layers, states[:-1], sizes[:-1], strict=False)):
        first, second = (
            _weight(target, f"layers.{i}.{norm}") for norm in ("input_layernorm", "post_attention_layernorm")
        )
        layer.input_layernorm.weight.fill_((size * _rms(first)).item())
        layer.post_attention_layernorm.weight.fill_((size * _rms(second)).item())
        _inherit_attention(layer.self_attn, target, i, (first / _rms(first))[:, None] * read, write)
        x = x / _rms(x) * second  # as if attention had added nothing
        _inherit_feed_forward(layer.mlp, target, i, x, (second / _rms(second))[:, None] * read, write)


def principal_axes(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[n, width] -> [width, min(count, width)]: orthonormal columns that keep most of the rows' squares."""
    vectors: torch.Tensor = torch.linalg.eigh(rows.T @ rows).eigenvectors
    return vectors.flip(1)[:, :count]


def heaviest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, in order."""
    return weights.topk(min(count, len(weights))).indices.sort().values


def _inherit_attention(
    own: Any, target: Checkpoint, layer: int, read: torch.Tensor, write: torch.Tensor
) -> None:
    """Of each K/V group that is kept the heads whose output is heaviest. read, write: [width, own]."""
    config, dim, width = target.config, target.config.head_dim, read.shape[1]
    q, k, v, o = (_weight(target, f"layers.{layer}.self_attn.{part}_proj") for part in "qkvo")
    shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    o = o.T.reshape(*shape, dim, -1)
    weights = o.flatten(2).norm(dim=2)
    num_own_kv = own.k_proj.out_features // dim
    num_own = own.q_proj.out_features // dim // num_own_kv
    for i, group in enumerate(heaviest(weights.sum(dim=1), num_own_kv)):
        heads = heaviest(weights[group], num_own)
        for proj, rows in ((own.k_proj, k), (own.v_proj, v)):
            proj.weight.view(num_own_kv, dim, -1)[i, :, :width] = rows.view(shape[0], dim, -1)[group] @ read
        mine = slice(i * num_own, i * num_own + len(heads))
        own.q_proj.weight.view(-1, dim, own.q_proj.in_features)[mine, :, :width] = (
            q.view(*shape, dim, -1)[group, heads] @ read
        )
        own.o_proj.weight[:width].view(width, -1, dim)[:, mine] = (o[group, heads] @ write).movedim(2, 0)


def _inherit_feed_forward(
    own: Any, target: Checkpoint, layer: int, rows: torch.Tensor, read: torch.Tensor, write: torch.Tensor
) -> None:
    """The neurons whose output is heaviest where the target reads `rows`, [n, width]."""
    gate, up, down = (_weight(target, f"layers.{layer}.mlp.{part}_proj") for part in ("gate", "up", "down"))
    values = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
    neurons = heaviest(values.norm(dim=0) * down.norm(dim=0), own.gate_proj.out_features)
    n, width = len(neurons), read.shape[1]
    own.gate_proj.weight[:n, :width] = gate[neurons] @ read
    own.up_proj.weight[:n, :width] = up[neurons] @ read
    own.down_proj.weight[:width, :n] = write.T @ down[:, neurons]


def _weight(target: Checkpoint, name: str) -> torch.Tensor:
    return target.weights.get(f"model.{name}.weight").float()


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean(dim=-1, keepdim=True).sqrt()
