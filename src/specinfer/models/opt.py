"""OPT (Zhang et al., arXiv 2205.01068): learned positions, LayerNorm, ReLU; opt-350m norms last and projects
a narrower embedding."""

from __future__ import annotations

import torch

from specinfer.models.builder import Builder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder, PostNormLayer, PreNormLayer, compose
from specinfer.models.family import Family
from specinfer.models.feed_forward import FeedForward
from specinfer.models.raw import RawConfig
from specinfer.models.self_attention import SelfAttention

LAYERS = "model.decoder.layers"
EMBEDDING = "model.decoder.embed_tokens"
POSITION_OFFSET = 2
"""The first rows of the position table are for padding."""


def read_config(raw: RawConfig) -> ModelConfig:
    raw.expect(activation_function="relu", layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    hidden_size, num_heads = raw.read("hidden_size", int), raw.read("num_attention_heads", int)
    num_layers = raw.read("num_hidden_layers", int)
    return ModelConfig(
        model_type=raw.read("model_type", str),
        vocab_size=raw.read("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // max(1, num_heads),
        intermediate_size=raw.read("ffn_dim", int),
        norm_eps=1e-5,
        max_position=raw.read("max_position_embeddings", int, 2048),
        tie_embeddings=raw.read("tie_word_embeddings", bool, True),
        windows=(None,) * num_layers,
        rope=None,
        embedding_size=raw.read("word_embed_proj_dim", int, hidden_size),
        norm_first=raw.read("do_layer_norm_before", bool, True),
    )


def build(b: Builder) -> Decoder:
    c = b.config
    tokens = b.table(f"{EMBEDDING}.weight", c.vocab_size, c.embedding_size)
    places = b.table("model.decoder.embed_positions.weight", c.max_position + POSITION_OFFSET, c.hidden_size)
    project_in = project_out = None
    if c.embedding_size != c.hidden_size:
        project_in = b.linear(c.embedding_size, {"model.decoder.project_in": c.hidden_size})
        project_out = b.linear(c.hidden_size, {"model.decoder.project_out": c.embedding_size})
    widen = compose(project_in)

    def embed(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return widen(tokens.index_select(0, token_ids)) + places.index_select(0, positions + POSITION_OFFSET)

    return Decoder(
        c,
        embed,
        [build_layer(b, i) for i in range(c.num_layers)],
        compose(
            b.layer_norm("model.decoder.final_layer_norm") if c.norm_first else None,
            project_out,
            b.head(EMBEDDING),
        ),
    )


def build_layer(b: Builder, index: int) -> PreNormLayer | PostNormLayer:
    c = b.config
    name = f"{LAYERS}.{index}"
    qkv = {f"{name}.self_attn.{part}_proj": c.hidden_size for part in "qkv"}
    layer = PreNormLayer if c.norm_first else PostNormLayer
    return layer(
        b.layer_norm(f"{name}.self_attn_layer_norm"),
        SelfAttention(
            index,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            b.linear(c.hidden_size, qkv),
            b.linear(c.hidden_size, {f"{name}.self_attn.out_proj": c.hidden_size}),
        ),
        b.layer_norm(f"{name}.final_layer_norm"),
        FeedForward(
            b.linear(c.hidden_size, {f"{name}.fc1": c.intermediate_size}),
            torch.relu,
            b.linear(c.intermediate_size, {f"{name}.fc2": c.hidden_size}),
        ),
    )


FAMILY = Family(read_config, build, "model.", LAYERS, EMBEDDING)
