"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, GELU, weights stored as [in, out]."""

from __future__ import annotations

import torch

from specinfer.models.builder import Builder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder, PreNormLayer, compose
from specinfer.models.family import Family
from specinfer.models.feed_forward import FeedForward, gelu_tanh
from specinfer.models.linear import Linear
from specinfer.models.raw import RawConfig
from specinfer.models.self_attention import SelfAttention

LAYERS = "transformer.h"
EMBEDDING = "transformer.wte"


def read_config(raw: RawConfig) -> ModelConfig:
    raw.expect(
        activation_function="gelu_new",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    hidden_size, num_heads = raw.read("n_embd", int, 768), raw.read("n_head", int, 12)
    num_layers = raw.read("n_layer", int, 12)
    return ModelConfig(
        model_type=raw.read("model_type", str),
        vocab_size=raw.read("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // max(1, num_heads),
        intermediate_size=raw.read("n_inner", int, 4 * hidden_size),
        norm_eps=raw.read("layer_norm_epsilon", float, 1e-5),
        max_position=raw.read("n_positions", int, 1024),
        tie_embeddings=raw.read("tie_word_embeddings", bool, True),
        windows=(None,) * num_layers,
        rope=None,
        embedding_size=hidden_size,
    )


def build(b: Builder) -> Decoder:
    c = b.config
    tokens = b.table(f"{EMBEDDING}.weight", c.vocab_size, c.hidden_size)
    places = b.table("transformer.wpe.weight", c.max_position, c.hidden_size)

    def embed(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return tokens.index_select(0, token_ids) + places.index_select(0, positions)

    return Decoder(
        c,
        embed,
        [build_layer(b, i) for i in range(c.num_layers)],
        compose(b.layer_norm("transformer.ln_f"), b.head(EMBEDDING)),
    )


def build_layer(b: Builder, index: int) -> PreNormLayer:
    c = b.config
    name = f"{LAYERS}.{index}"

    def linear(part: str, in_features: int, out_features: int) -> Linear:
        return b.linear(in_features, {f"{name}.{part}": out_features}, transposed=True)

    return PreNormLayer(
        b.layer_norm(f"{name}.ln_1"),
        SelfAttention(
            index,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            linear("attn.c_attn", c.hidden_size, 3 * c.hidden_size),
            linear("attn.c_proj", c.hidden_size, c.hidden_size),
        ),
        b.layer_norm(f"{name}.ln_2"),
        FeedForward(
            linear("mlp.c_fc", c.hidden_size, c.intermediate_size),
            gelu_tanh,
            linear("mlp.c_proj", c.intermediate_size, c.hidden_size),
        ),
    )


FAMILY = Family(read_config, build, "transformer.", LAYERS, EMBEDDING)
