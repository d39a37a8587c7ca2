"""RopeConfig: how a checkpoint's rotary frequencies are made, read from Hugging Face keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from specinfer.errors import ModelError
from specinfer.models.raw import RawConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is one of KINDS.

    original_max_position: positions before scaling. attention_factor multiplies cosines and sines (yarn,
    longrope). freq_factors divide the frequencies (GGUF); short_factors and long_factors do in longrope.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: torch.Tensor | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def frequencies(self, head_dim: int, max_position: int) -> torch.Tensor:
        """[head_dim / 2], fp32. max_position: positions that will be used, which decides between longrope's
        factors once: by the longest sequence at hand, a token's would depend on what else is in the tree.

        Up to the original context, all that max_position allows it, `dynamic` is `default`.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / (self.theta**exponents)
        if self.freq_factors is not None:
            plain = plain / self.freq_factors.float()
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        if self.kind == "longrope":
            is_long = max_position > self.original_max_position
            return plain / torch.tensor(self.long_factors if is_long else self.short_factors)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        wavelengths = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_max_position / wavelengths - low) / (high - low)
        blended = (1 - smooth) * plain / self.factor + smooth * plain
        scaled = torch.where(wavelengths > self.original_max_position / low, plain / self.factor, plain)
        medium = (wavelengths <= self.original_max_position / low) & (
            wavelengths >= self.original_max_position / high
        )
        return torch.where(medium, blended, scaled)

    def _yarn(self, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Peng et al., arXiv 2309.00071: dimensions that turn often stay, slow ones are interpolated."""

        def dimension(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        interpolated = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
        return plain / self.factor * interpolated + plain * (1 - interpolated)


def read_rope(raw: RawConfig, head_dim: int, max_position: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises ModelError."""
    given = raw.read("rope_parameters", dict, None) or raw.read("rope_scaling", dict, {})
    if any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{raw.source}: rope parameters that differ between layers are not supported")
    rope = RawConfig({"rope_theta": raw.values.get("rope_theta"), **given}, raw.source)
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(
            f"{raw.source}: rope type {kind!r} is not supported", hint=f"supported: {', '.join(KINDS)}"
        )
    rope.expect(partial_rotary_factor=1.0, mrope_section=None)
    original = raw.read(
        "original_max_position_embeddings",
        int,
        rope.read("original_max_position_embeddings", int, max_position),
    )
    if kind in ("linear", "llama3", "dynamic"):
        factor = rope.read("factor", float)
    else:
        factor = rope.read("factor", float, max_position / original)
    factors = {}
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors[f"{name}s"] = tuple(float(value) for value in rope.read(name, list))
        if len(factors[f"{name}s"]) != head_dim // 2:
            raise ModelError(f"{raw.source}: {name} has {len(rope.values[name])} values, not {head_dim // 2}")
    return RopeConfig(
        theta=rope.read("rope_theta", float, 10000.0),
        kind=kind,
        factor=factor,
        original_max_position=original,
        attention_factor=attention_factor(rope, kind, factor, original),
        low_freq_factor=rope.read("low_freq_factor", float, 1.0),
        high_freq_factor=rope.read("high_freq_factor", float, 4.0),
        beta_fast=rope.read("beta_fast", float, 32.0),
        beta_slow=rope.read("beta_slow", float, 1.0),
        truncate=rope.read("truncate", bool, True),
        freq_factors=rope.values.get("freq_factors"),
        **factors,
    )


def attention_factor(rope: RawConfig, kind: str, factor: float, original: int) -> float:
    """What yarn and longrope multiply cosines and sines by: given, or by the papers' formulas."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    given = rope.read("attention_factor", float, None)
    if given is not None or factor <= 1:
        return 1.0 if given is None else float(given)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, scale_all = rope.read("mscale", float, 0.0), rope.read("mscale_all_dim", float, 0.0)
    if scale and scale_all:
        return float((0.1 * scale * math.log(factor) + 1) / (0.1 * scale_all * math.log(factor) + 1))
    return 0.1 * math.log(factor) + 1
