"""Any other decoder: transformers' own modelling code, with our attention under it.

Its layers call attention through transformers' registry of implementations; ours is one of them, and since it
has no mask function there, no mask is built. What the model does beside attention is its own affair, so a
check at load runs a small tree and compares it with the model's own attention: whatever carries state from
token to token by other means shows there, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from specinfer.attention import AttentionBackend, Span, TorchAttention
from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig
from specinfer.models.raw import RawConfig

NAME = "specinfer"
FULL, SLIDING = "full_attention", "sliding_attention"
USE_A_FAMILY = "use a model whose attention is plain, or one of the families in docs/models.md"
PASSED_ON = {"position_ids", "position_embeddings", "hidden_states", "use_cache"}
"""Arguments that reach attention on their way to somewhere else."""
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Of the largest logit."""


def read_config(raw: RawConfig, directory: Path) -> ModelConfig:
    """What transformers makes of a directory's config.json. Raises ModelError with the reason for a model
    that cannot run here, as far as its config shows it."""
    model_type = raw.read("model_type", str)
    try:
        config: Any = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers has no error type of its own
        raise refusal(raw.source, model_type, f"transformers cannot read it ({first_line(error)})") from error
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None or getattr(config, "is_encoder_decoder", False):
        raise refusal(raw.source, model_type, "it is no decoder that transformers knows")
    if not getattr(architecture, "_supports_attention_backend", False):
        raise refusal(raw.source, model_type, "its attention does not go through transformers' registry")
    if "position_ids" not in inspect.signature(architecture.forward).parameters:
        raise refusal(raw.source, model_type, "it does not take position ids")
    num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
    is_multi_query = getattr(config, "multi_query", False)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * num_layers
    if other := sorted(set(types) - {FULL, SLIDING}):
        raise refusal(raw.source, model_type, f"it has layers of type {', '.join(other)}")
    return ModelConfig(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1 if is_multi_query else getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        intermediate_size=0,
        norm_eps=0.0,
        max_position=max_position(config),
        tie_embeddings=bool(config.tie_word_embeddings),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        rope=None,
        embedding_size=config.hidden_size,
    )


def max_position(config: Any) -> int:
    """Longrope's frequencies depend on the longest sequence of a forward; up to the original context they
    stay the same."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [config.max_position_embeddings]
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") == "longrope":
            limits.append(part["original_max_position_embeddings"])
    return int(min(limits))


class ForeignModel:
    """A model in memory, bound to the attention that it runs with."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Loads the weights. Raises ModelError with the reason for a model that cannot run here."""
        self.config = config
        self._directory = directory
        self._attention: AttentionBackend = attention
        AttentionInterface.register(NAME, attend)
        self._model = self._load(dtype).to(device).eval()
        parameters = inspect.signature(self._model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        for module in self._model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.specinfer_model = self
        self._check(dtype, device)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """token_ids, positions: [n], flattened as the attention was planned; logits of `rows`."""
        arguments = {"logits_to_keep": rows} if self._keeps_rows else {}
        out = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **arguments
        )
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps_rows else logits.index_select(0, rows)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """As AttentionBackend.run. Raises ModelError for what the config did not promise."""
        c = self.config
        shapes = tuple(q.shape[1:]), tuple(k.shape[1:]), tuple(v.shape[1:])
        kv_shape = (c.num_kv_heads, c.head_dim)
        if shapes != ((c.num_heads, c.head_dim), kv_shape, kv_shape):
            raise self.refusal(f"its queries, keys and values are {shapes}, heads by width")
        if window != c.windows[layer]:
            raise self.refusal(f"layer {layer} has window {window}, its config says {c.windows[layer]}")
        own_scale = c.head_dim**-0.5
        return self._attention.run(q if scale == own_scale else q * (scale / own_scale), k, v, layer)

    def refusal(self, reason: str) -> ModelError:
        return refusal(str(self._directory), self.config.model_type, reason)

    def _load(self, dtype: torch.dtype) -> Any:
        try:
            with quiet():
                model, loading = AutoModelForCausalLM.from_pretrained(
                    str(self._directory),
                    dtype=dtype,
                    attn_implementation=NAME,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except Exception as error:  # transformers has no error type of its own
            raise self.refusal(f"transformers cannot load it ({first_line(error)})") from error
        if missing := sorted(loading["missing_keys"]):
            raise self.refusal(f"its weights lack {missing[0]}")
        return model

    @torch.inference_mode()
    def _check(self, dtype: torch.dtype, device: torch.device) -> None:
        """A trunk of three and a tree below it, against the model's own attention on each node's path."""
        c = self.config
        parents = np.array([-1, 0, 1, 2, 3, 2, 5, 5])
        token_ids = torch.from_numpy(np.random.default_rng(0).integers(0, c.vocab_size, 8)).to(device)
        span = Span(np.arange(0), np.arange(8), parents)
        shape = (9, c.num_kv_heads, c.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.num_layers)] for _ in "kv"
        )
        recorder = Recorder(
            keys, values, num_heads=c.num_heads, scale=c.head_dim**-0.5, null_slot=8, windows=c.windows
        )
        recorder.plan([span])
        attention, self._attention = self._attention, recorder
        rows = torch.arange(8, device=device)
        try:
            ours = self.forward(token_ids, torch.from_numpy(span.depths()).to(device), rows)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise self.refusal(f"its own code fails ({first_line(error)})") from error
        self._attention = attention
        if recorder.layers != list(range(c.num_layers)):
            raise self.refusal(f"of {c.num_layers} layers, those that attend are {recorder.layers}")
        self._model.set_attn_implementation("eager")
        for path in span.leaf_paths():
            sequence = self._model(input_ids=token_ids[path][None], use_cache=False).logits[0]
            distance = float((ours[path] - sequence).abs().max() / sequence.abs().max())
            if not distance <= CHECK_TOLERANCE[dtype]:
                raise self.refusal(
                    f"its logits in a tree differ from its own by {distance:.1g} of the largest"
                )
        self._model.set_attn_implementation(NAME)


class Recorder(TorchAttention):
    """Keeps which layers attend, in their order."""

    layers: list[int]

    def plan(self, spans: Sequence[Span]) -> None:
        super().plan(spans)
        self.layers = []

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        self.layers.append(layer)
        return super().run(q, k, v, layer)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What a layer of transformers calls. query: [1, num_heads, n, head_dim], key and value with their own
    number of heads -> [1, n, num_heads, head_dim]."""
    model: ForeignModel = module.specinfer_model
    if attention_mask is not None or is_causal is False:
        raise model.refusal("it builds a mask of its own")
    for name, argument in others.items():
        if argument is not None and argument is not False and name not in PASSED_ON:
            raise model.refusal(f"its attention has {name!r}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return model.attend(module.layer_idx, q, k, v, scale, sliding_window)[None], None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and warnings meanwhile: what matters of them is checked and raised here."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def refusal(source: str, model_type: str, reason: str) -> ModelError:
    return ModelError(f"{source}: model type {model_type!r} is not supported: {reason}", hint=USE_A_FAMILY)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
