"""Llama (Touvron et al., arXiv 2302.13971 and later): RMSNorm, rotary, grouped queries, SwiGLU."""

from __future__ import annotations

import torch

from specinfer.models.builder import Builder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder, PreNormLayer, compose
from specinfer.models.family import Family
from specinfer.models.feed_forward import GatedFeedForward
from specinfer.models.raw import RawConfig
from specinfer.models.rope import read_rope
from specinfer.models.rotary import Rotary
from specinfer.models.self_attention import SelfAttention

PREFIX = "model."
LAYERS = "model.layers"
EMBEDDING = "model.embed_tokens"


def read_config(raw: RawConfig) -> ModelConfig:
    raw.expect(hidden_act="silu", partial_rotary_factor=1.0)
    num_heads = raw.read("num_attention_heads", int)
    hidden_size = raw.read("hidden_size", int)
    num_layers = raw.read("num_hidden_layers", int)
    head_dim = raw.read("head_dim", int, hidden_size // max(1, num_heads))
    max_position = raw.read("max_position_embeddings", int, 2048)
    rope = read_rope(raw, head_dim, max_position)
    if rope.kind == "yarn":  # switched on in the config alone, it reaches beyond max_position_embeddings
        max_position = max(max_position, int(rope.factor * rope.original_max_position))
    return ModelConfig(
        model_type=raw.read("model_type", str),
        vocab_size=raw.read("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.read("num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        intermediate_size=raw.read("intermediate_size", int),
        norm_eps=raw.read("rms_norm_eps", float, 1e-6),
        max_position=max_position,
        tie_embeddings=raw.read("tie_word_embeddings", bool, False),
        windows=(None,) * num_layers,
        rope=rope,
        embedding_size=hidden_size,
    )


def build(b: Builder, head_norms: tuple[str, str] | None = None) -> Decoder:
    """head_norms: names, in a layer's attention, of the norms of q's and k's heads."""
    rotary = b.rotary()
    embedding = b.table(f"{EMBEDDING}.weight", b.config.vocab_size, b.config.hidden_size)

    def embed(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embedding.index_select(0, token_ids)

    return Decoder(
        b.config,
        embed,
        [build_layer(b, i, rotary, head_norms) for i in range(b.config.num_layers)],
        compose(b.rms_norm("model.norm"), b.head(EMBEDDING)),
        rotary,
    )


def build_layer(b: Builder, index: int, rotary: Rotary, head_norms: tuple[str, str] | None) -> PreNormLayer:
    c = b.config
    name = f"{LAYERS}.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    num_q, num_kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parts = {f"{attention}.q_proj": num_q, f"{attention}.k_proj": num_kv, f"{attention}.v_proj": num_kv}
    norms = None
    if head_norms is not None:
        q_norm, k_norm = (b.rms_norm(f"{attention}.{norm}", c.head_dim) for norm in head_norms)
        norms = q_norm, k_norm
    return PreNormLayer(
        b.rms_norm(f"{name}.input_layernorm"),
        SelfAttention(
            index,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            b.linear(c.hidden_size, parts),
            b.linear(num_q, {f"{attention}.o_proj": c.hidden_size}),
            rotary,
            norms,
        ),
        b.rms_norm(f"{name}.post_attention_layernorm"),
        GatedFeedForward(
            b.linear(
                c.hidden_size,
                {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size},
            ),
            b.linear(c.intermediate_size, {f"{mlp}.down_proj": c.hidden_size}),
        ),
    )


FAMILY = Family(read_config, build, PREFIX, LAYERS, EMBEDDING)
