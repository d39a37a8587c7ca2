"""Layout: where a family's checkpoint holds what the extension knows by names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specinfer.models import gpt2, llama, opt


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The extension's names to the checkpoint's; those of a layer are relative to it.

    linears: the parts of each packed linear, in the order in which the extension wants their types; v
    is packed with q and k where its type is theirs.
    transposed: linears are stored as [in, out]. positions: a learned table, whose first position_offset rows
    are for padding. inner: how the feed-forward's inner rows are made.
    """

    layers: str
    linears: tuple[Mapping[str, str], ...]
    norms: Mapping[str, str]
    embedding: str
    final_norm: str
    positions: str | None = None
    position_offset: int = 0
    inner: str = "gated"
    layer_norm: bool = False
    transposed: bool = False


LLAMA = Layout(
    layers=llama.LAYERS,
    linears=(
        {"q": "self_attn.q_proj", "k": "self_attn.k_proj"},
        {"v": "self_attn.v_proj"},
        {"out": "self_attn.o_proj"},
        {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
        {"down": "mlp.down_proj"},
    ),
    norms={"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    embedding=llama.EMBEDDING,
    final_norm="model.norm",
)
LAYOUTS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": replace(
        LLAMA, norms={**LLAMA.norms, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    ),
    "opt": Layout(
        layers=opt.LAYERS,
        linears=(
            {"q": "self_attn.q_proj", "k": "self_attn.k_proj"},
            {"v": "self_attn.v_proj"},
            {"out": "self_attn.out_proj"},
            {"up": "fc1"},
            {"down": "fc2"},
        ),
        norms={"input_norm": "self_attn_layer_norm", "post_norm": "final_layer_norm"},
        embedding=opt.EMBEDDING,
        final_norm="model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions",
        position_offset=opt.POSITION_OFFSET,
        inner="relu",
        layer_norm=True,
    ),
    "gpt2": Layout(
        layers=gpt2.LAYERS,
        linears=(
            {"qkv": "attn.c_attn"},
            {},
            {"out": "attn.c_proj"},
            {"up": "mlp.c_fc"},
            {"down": "mlp.c_proj"},
        ),
        norms={"input_norm": "ln_1", "post_norm": "ln_2"},
        embedding=gpt2.EMBEDDING,
        final_norm="transformer.ln_f",
        positions="transformer.wpe",
        inner="gelu",
        layer_norm=True,
        transposed=True,
    ),
}
"""By `model_type`."""
