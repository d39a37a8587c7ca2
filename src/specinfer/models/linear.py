"""Linear layers and the factory that models build every weight through.

On CPU a row's bits must not depend on how many rows share the call (design.md 3): weights are prepacked by
oneDNN, bf16 ones where the CPU multiplies bf16. (On such a CPU torch's own `linear` has two kernels, one for
small products; on others it has one.) All run on at most MAX_ROWS rows at a time. A single row takes another
kernel on some CPUs: it is padded to two, save where an fp32 layer finds the bits to be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

MAX_ROWS = 96
PACKING_ROWS = 16
"""The row count that oneDNN lays a packed weight out for; see docs/log.md for what others cost."""


class Linear(Protocol):
    """x: [n, in_features] -> [n, out_features], same dtype."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class CpuLinear:
    """y = x W^T + b with bits that depend on the row alone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        is_fp32 = weight.dtype == torch.float32
        self._packed = is_fp32 or (weight.dtype == torch.bfloat16 and multiplies_bf16())
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS)
            if self._packed
            else weight.contiguous()
        )
        self._bias = bias
        self.num_bytes = weight.numel() * weight.element_size()
        # In bf16 the rounding of the result would hide another order of additions from the probe.
        probe = torch.linspace(-1, 1, 2 * weight.shape[1]).sin().to(weight.dtype).view(2, -1)
        is_same = is_fp32 and torch.equal(self._rows(probe[:1]), self._rows(probe)[:1])
        self._min_rows = 1 if is_same else 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n < self._min_rows:
            return self._rows(F.pad(x, (0, 0, 0, self._min_rows - n)))[:n]
        if n <= MAX_ROWS:
            return self._rows(x)
        # Even blocks: none may be left with a single row.
        return torch.cat([self._rows(block) for block in x.tensor_split(-(-n // MAX_ROWS))])

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x.contiguous(), self._weight, self._bias, "none", [], ""
            )
            return y
        return F.linear(x, self._weight, self._bias)


def multiplies_bf16() -> bool:
    """Whether oneDNN is there and takes bf16 on this CPU."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class DeviceLinear:
    """Plain torch `linear`, for devices whose libraries promise no bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class LinearFactory:
    """Makes a model's weights for one dtype and device. Packed, quantised, sharded and streamed weights are
    other factories; model files do not know."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.num_bytes = 0

    def linear(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Linear:
        """One layer for weights that share their input, outputs side by side."""
        weight = torch.cat([w.to(self.dtype) for w in weights]).to(self.device)
        bias = None
        if any(b is not None for b in biases):
            parts = [
                torch.zeros(w.shape[0]) if b is None else b.float()
                for w, b in zip(weights, biases, strict=True)
            ]
            bias = torch.cat(parts).to(self.device, self.dtype)
        layer = CpuLinear(weight, bias) if self.device.type == "cpu" else DeviceLinear(weight, bias)
        self.num_bytes += layer.num_bytes
        return layer

    def table(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight that is looked up or multiplied elementwise."""
        result = weight.to(self.device, self.dtype)
        self.num_bytes += result.numel() * result.element_size()
        return result
