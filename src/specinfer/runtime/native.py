"""NativeRunner: a whole forward in one call of the extension `specinfer._cpu`, on a CPU.

Weights are packed once, in fp32, bf16 or GGUF's blocks. Hidden rows and arithmetic are fp32, save that
a row is quantised to meet quantised weights, and they multiply in integers, and that level avx512_bf16 rounds
it to bf16 to meet bf16 weights. A row's bits depend on its own tokens alone: not on the rows beside it, the
number of threads or the shape of the batch (design.md 3).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specinfer.attention import Span
from specinfer.cache import KVPool
from specinfer.errors import ConfigError, ModelError
from specinfer.extension import extension
from specinfer.models.config import ModelConfig
from specinfer.models.gguf import GGUFFile
from specinfer.models.loader import Checkpoint
from specinfer.models.rotary import Rotary
from specinfer.models.weights import FEATURES, find, take
from specinfer.runtime.batch import Batch, Ints
from specinfer.runtime.cores import num_cores, one_per_core
from specinfer.runtime.kept import Keep, linear_types, type_name
from specinfer.runtime.layout import LAYOUTS
from specinfer.runtime.runner import Runner

VARIABLE = "SPECINFER_CPU"
PIN_VARIABLE = "SPECINFER_PIN"
LEVELS = ("avx512_bf16", "avx512", "avx2", "portable")
NONE = np.zeros(0, np.int64)
NO_LAYER = -1


def wanted_level() -> str | None:
    """What SPECINFER_CPU asks for: a level, "" for the best, None for the torch path. Raises ConfigError."""
    name = os.environ.get(VARIABLE, "")
    if name == "off":
        return None
    if name not in ("", *LEVELS):
        raise ConfigError(f"{VARIABLE} is {name!r}", hint=f"use {', '.join(LEVELS)} or off, or unset it")
    module = extension()
    if name and module is None:
        raise ConfigError(f"{VARIABLE} is {name!r}, but specinfer._cpu was not built")
    if module is not None:
        try:
            module.level(name)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}", hint="unset it for the best that there is") from None
    return name


def pin_threads(num_threads: int) -> None:
    """Keep the pool's threads on a core each, where SPECINFER_PIN is 1. Raises ConfigError."""
    wanted, module = os.environ.get(PIN_VARIABLE, ""), extension()
    if wanted not in ("", "0", "1"):
        raise ConfigError(f"{PIN_VARIABLE} is {wanted!r}", hint="1 keeps every thread on a core of its own")
    if wanted == "1" and module is not None:
        try:
            module.pin(num_threads, one_per_core())
        except ValueError as error:
            raise ConfigError(f"{PIN_VARIABLE}: {error}", hint="unset it") from None


def why_not(checkpoint: Checkpoint, device: torch.device) -> str | None:
    """Why a model does not run natively, None if it does."""
    config = checkpoint.config
    if device.type != "cpu":
        return f"the device is {device.type}"
    if extension() is None:
        return "specinfer._cpu was not built (it needs cmake and a C++17 compiler at install)"
    if wanted_level() is None:
        return f"{VARIABLE} is off"
    if config.model_type not in LAYOUTS:
        return f"model type {config.model_type!r} is not covered"
    if not config.norm_first:
        return "its layers normalise what comes out of their parts"
    if config.embedding_size != config.hidden_size:
        return "its embedding is narrower than its layers"
    if config.head_dim % 8:
        return f"a head dimension of {config.head_dim} is not a multiple of 8"
    return None


@contextmanager
def own_threads(runner: Runner) -> Iterator[None]:
    """While a native runner works, torch keeps to one thread: its pool would spin where ours has work."""
    if not isinstance(runner, NativeRunner):
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class NativeModel:
    """A model in packed weights. Whoever runs ranges of layers uses its head."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        pool: KVPool,
        max_position: int,
        keep: Keep,
        level: str,
        num_threads: int | None,
    ) -> None:
        module = extension()
        assert module is not None
        self.config = c = checkpoint.config
        self.head_size = checkpoint.head_size
        self._layout = LAYOUTS[c.model_type]
        self._reads_features = checkpoint.reads_features
        threads = num_threads or min(torch.get_num_threads(), num_cores())
        self._types = linear_types(checkpoint, keep, dtype)
        self.weight_types = tuple(dict.fromkeys(self._types))
        try:
            self._native: Any = module.Model(
                hidden=c.hidden_size, layers=c.num_layers, heads=c.num_heads, kv_heads=c.num_kv_heads,
                head_dim=c.head_dim, intermediate=c.intermediate_size, vocab=c.vocab_size,
                head_size=self.head_size, eps=c.norm_eps, tied=c.tie_embeddings, inner=self._layout.inner,
                layer_norm=self._layout.layer_norm, head_norms="q_norm" in self._layout.norms,
                windows=[window or c.max_position for window in c.windows],
                features=checkpoint.reads_features, types=self._types, level=level, threads=threads,
            )  # fmt: skip
            self._load(checkpoint)
        except ValueError as error:
            raise ModelError(
                f"{checkpoint.path}: weights do not fit the config ({error})",
                hint="check that config and weights belong to the same model",
            ) from None
        tables = self._positions(checkpoint, max_position)
        self._kept: tuple[object, ...] = (pool, tables)  # the extension has their addresses
        self._native.set_positions(*(0 if t is None else t.data_ptr() for t in tables), max_position)
        self._native.set_pool(
            [t.data_ptr() for t in pool.k],
            [t.data_ptr() for t in pool.v],
            pool.k[0].shape[0] if pool.k else 0,
            type_name(pool.k[0].dtype if pool.k else dtype),
        )
        self.level: str = self._native.level
        self.num_threads: int = self._native.threads
        pin_threads(self.num_threads)
        self.num_bytes: int = self._native.num_bytes + sum(t.nbytes for t in tables if t is not None)

    def embed(self, token_ids: Ints) -> torch.Tensor:
        """[n, hidden_size] rows before the first layer, of tokens at position 0."""
        hidden = torch.empty(len(token_ids), self.config.hidden_size)
        self._native.embed(ints(token_ids), hidden.data_ptr())
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> logits [rows, head_size]."""
        batch = rows_alone(len(hidden))
        logits = torch.empty(len(hidden), self.head_size)
        self.forward(batch, range(0), hidden_in=hidden, logits=logits)
        return logits

    def forward(
        self,
        batch: Batch,
        layers: range,
        *,
        hidden_in: torch.Tensor | None = None,
        hidden_out: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        captured: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """One native call; results are written into the tensors given."""
        spans = batch.spans
        captured = captured or {}
        if hidden_in is not None:
            hidden_in = hidden_in.float().contiguous()
            if hidden_in.shape != (len(batch.token_ids), self.config.hidden_size):
                raise ValueError(f"hidden rows are {tuple(hidden_in.shape)}")
        self._native.forward(
            joined([s.context_slots for s in spans]),
            ints([len(s.context_slots) for s in spans]),
            ints([len(s.slots) for s in spans]),
            joined([s.slots for s in spans]),
            joined([s.parents for s in spans]),
            ints(batch.token_ids) if hidden_in is None else NONE,
            ints(batch.logits_rows) if logits is not None else NONE,
            layers.start,
            layers.stop,
            0 if hidden_in is None else hidden_in.data_ptr(),
            0 if hidden_out is None else hidden_out.data_ptr(),
            0 if logits is None else logits.data_ptr(),
            ints(list(captured)),
            ints([t.data_ptr() for t in captured.values()]),
        )

    def read_features(self, target: NativeModel, pool: KVPool) -> None:
        """As FeatureReader reads, within the forward, from the rows that the target keeps in `pool`, this
        draft's, from now on."""
        assert pool.rows is not None
        self._native.read_features(target._native, pool.rows.data_ptr(), pool.scratch_start, pool.null_slot)
        target._kept += (pool,)

    def withhold(self, layer: int) -> None:
        """Let forwards wait before a layer whose weights are on their way, until `release`. Whoever withholds
        a layer must release it, also when loading it fails."""
        self._native.withhold(layer)

    def release(self, layer: int) -> None:
        """Let forwards go on, from another thread than theirs."""
        self._native.release(layer)

    def load_layer(self, checkpoint: Checkpoint, layer: int) -> None:
        """Pack a layer's weights where its place is. Raises ModelError, and ValueError for another shape."""
        prefix, first = f"{self._layout.layers}.{layer}", layer * len(self._layout.linears)
        for kind, parts in zip(self._types[first:], self._layout.linears, strict=False):
            for name, source in parts.items():
                self._set_linear(checkpoint, name, layer, f"{prefix}.{source}", kind, f"{prefix}.{source}")
        for name, source in self._layout.norms.items():
            self._set_norm(checkpoint, name, layer, f"{prefix}.{source}")

    def _load(self, checkpoint: Checkpoint) -> None:
        layout, tied = self._layout, self.config.tie_embeddings
        end_types = self._types[self.config.num_layers * len(layout.linears) :]
        # The largest first: what they are read into is several times what is packed.
        source = layout.embedding if tied else "lm_head"
        self._set_linear(checkpoint, "head", NO_LAYER, source, end_types[0], "lm_head")
        if not tied:
            self._set_linear(checkpoint, "embedding", NO_LAYER, layout.embedding, end_types[1])
        if self._reads_features:
            source = FEATURES.removesuffix(".weight")
            self._set_linear(checkpoint, "features", NO_LAYER, source, end_types[-1])
        for i in range(self.config.num_layers):
            self.load_layer(checkpoint, i)
        self._set_norm(checkpoint, "final_norm", NO_LAYER, layout.final_norm)
        self._native.finish()

    def _set_linear(
        self, checkpoint: Checkpoint, name: str, layer: int, source: str, kind: str, bias_source: str = ""
    ) -> None:
        weights, weight = checkpoint.weights, f"{source}.weight"
        if isinstance(weights, GGUFFile) and weights.stored(weight)[0].lower() == kind:
            w, shape = weights.blocks(weight), weights.stored(weight)[1]
        else:
            w = weights.get(weight)
            w = (w.T if self._layout.transposed and layer >= 0 else w).contiguous()
            kind, shape = type_name(w.dtype), tuple(w.shape)
        if len(shape) != 2:
            raise ValueError(f"{weight} has {len(shape)} dimensions")
        try:
            self._native.set(name, layer, w.data_ptr(), kind, *shape)
        except RuntimeError as error:
            raise ModelError(
                f"{checkpoint.path}: {weight}: {error}", hint="the file is damaged: fetch it again"
            ) from None
        if (bias := find(weights, f"{bias_source}.bias", shape[0])) is not None:
            bias = bias.float().contiguous()
            self._native.set_bias(name, layer, bias.data_ptr(), bias.numel())

    def _set_norm(self, checkpoint: Checkpoint, name: str, layer: int, source: str) -> None:
        w = checkpoint.weights.get(f"{source}.weight").float().contiguous()
        bias = None
        if self._layout.layer_norm:
            bias = take(checkpoint.weights, f"{source}.bias", len(w)).float().contiguous()
        self._native.set_norm(name, layer, w.data_ptr(), 0 if bias is None else bias.data_ptr(), w.numel())

    def _positions(self, checkpoint: Checkpoint, count: int) -> tuple[torch.Tensor | None, ...]:
        """Cosines, sines and learned rows of the positions that will be used, None for what there is not."""
        c, layout = self.config, self._layout
        if c.rope is not None:
            cos_sin = Rotary(c.rope, c.head_dim, count, torch.float32).at(torch.arange(count))
            return (*(table.contiguous() for table in cos_sin), None)
        offset = layout.position_offset
        table = take(checkpoint.weights, f"{layout.positions}.weight", c.max_position + offset, c.hidden_size)
        return None, None, table[offset : offset + count].float().contiguous()


class NativeRunner:
    """A ModelRunner whose forward is one native call."""

    keeps_bits = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        pool: KVPool,
        max_position: int,
        *,
        keep: Keep = "dtype",
        level: str = "",
        num_threads: int | None = None,
    ) -> None:
        """max_position: positions that will be used. level: "" for the CPU's best. Raises ModelError."""
        self.pool = pool
        self.model = NativeModel(checkpoint, dtype, pool, max_position, keep, level, num_threads)

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    def embed(self, token_ids: Ints) -> torch.Tensor:
        """As ModelRunner.embed."""
        return self.model.embed(token_ids)

    def read_features(self, target: NativeRunner) -> None:
        """As ModelRunner.read_features."""
        self.model.read_features(target.model, self.pool)

    def run(
        self, batch: Batch, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As ModelRunner.run."""
        layers = range(self.config.num_layers)
        logits = torch.empty(len(batch.logits_rows), self.model.head_size)
        captured = self._captured(batch, layers, capture_layers)
        self.model.forward(batch, layers, logits=logits, captured=captured)
        return logits, captured

    def run_layers(
        self, batch: Batch, hidden: torch.Tensor, layers: range, capture_layers: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As ModelRunner.run_layers."""
        result = torch.empty(hidden.shape)
        captured = self._captured(batch, layers, capture_layers)
        self.model.forward(batch, layers, hidden_in=hidden, hidden_out=result, captured=captured)
        return result, captured

    def _captured(
        self, batch: Batch, layers: range, capture_layers: Collection[int]
    ) -> dict[int, torch.Tensor]:
        shape = (len(batch.token_ids), self.model.config.hidden_size)
        return {i: torch.empty(shape) for i in layers if i in capture_layers}


def ints(values: Sequence[int] | Ints) -> Ints:
    return np.ascontiguousarray(values, np.int64)


def joined(arrays: Sequence[Ints]) -> Ints:
    return ints(arrays[0]) if len(arrays) == 1 else ints(np.concatenate(arrays)) if arrays else NONE


def rows_alone(n: int) -> Batch:
    """Rows for the head of a model, where nothing attends."""
    zeros = np.zeros(n, np.int64)
    return Batch((Span(NONE, zeros, zeros - 1),), zeros, np.arange(n))
