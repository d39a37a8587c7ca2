"""From an EngineConfig to an Engine: the one place where "auto" is resolved, and logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from specinfer.cache import PrefixCache, SlotAllocator
from specinfer.cache.pool import bytes_per_slot, rows_dtype
from specinfer.config import AUTO_TREE, EngineConfig
from specinfer.draft.drafter import Drafter
from specinfer.draft.ensemble import EnsembleDrafter
from specinfer.draft.history import OwnHistories, SharedHistories
from specinfer.draft.model import ModelDrafter
from specinfer.draft.ngram import NgramDrafter
from specinfer.draft.pairing import Pairing, pair
from specinfer.draft.planner import Planner
from specinfer.engine.engine import Engine
from specinfer.engine.parts import Parts
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import ConfigError, ModelError
from specinfer.metrics import StepTimer
from specinfer.models.borrowed import borrow
from specinfer.models.catalog import draft_path, resolve_model_path
from specinfer.models.gguf import GGUFFile
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import Checkpoint, open_checkpoint
from specinfer.models.tokenizer import Tokenizer, end_token_ids
from specinfer.models.weights import FEATURES
from specinfer.runtime import ModelRunner, Runner, make_pool, make_torch_runner
from specinfer.runtime.kept import Keep, type_name
from specinfer.runtime.native import NativeRunner, wanted_level, why_not
from specinfer.sampling.chooser import Chooser
from specinfer.sampling.noise import NoiseCache
from specinfer.tree import Topology, parse_topology
from specinfer.tree.token_tree import MAX_NODES
from specinfer.verify import Verifier, check_kinds, get_verifier

logger = logging.getLogger("specinfer")
AUTO_KV_BYTES = 2**30
MAX_FORCED_TOKENS = 16
"""Nodes of a step's tree that a grammar may force, beside those that are drafted."""
NGRAM = "ngram"


@dataclass(frozen=True)
class Loaded:
    """A model in memory. weight_bytes: what its weights take there, kept in these types."""

    name: str
    checkpoint: Checkpoint
    runner: Runner
    weight_bytes: int
    weight_types: tuple[str, ...]


@dataclass(frozen=True)
class Resolved:
    """What an EngineConfig comes to, found before any weight is read.

    drafts, pairings: by name, n-grams left out. max_tree_nodes: of the trees that are drafted, root included.
    """

    config: EngineConfig
    verifier: Verifier
    topology: Topology
    device: torch.device
    dtype: torch.dtype
    target: Checkpoint
    tokenizer: Tokenizer | None
    drafts: dict[str, Checkpoint]
    pairings: dict[str, Pairing]
    max_model_len: int
    max_tree_nodes: int
    num_slots: int

    def draft_len(self, name: str) -> int:
        """Positions that a draft is used for."""
        return min(self.max_model_len, self.drafts[name].config.max_position)


def build_engine(config: EngineConfig) -> Engine:
    """Load everything. Every error that needs no weights is raised before any is read."""
    resolved = resolve(config)
    try:
        target, drafts = load_models(resolved)
        return assemble(resolved, target, drafts)
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not is_memory:
            raise
        per_slot = slot_bytes([resolved.target, *resolved.drafts.values()], resolved.dtype, resolved.device)
        raise ConfigError(
            f"{config.model}, its drafts and {per_slot * resolved.num_slots / 2**30:.1f} GiB of K/V (for "
            f"{resolved.num_slots} tokens) do not fit the memory of {resolved.device}",
            hint="lower max_model_len or kv_memory, or take a smaller model",
        ) from None


def resolve(config: EngineConfig) -> Resolved:
    """Raises ConfigError, ModelError or DownloadError."""
    verifier = get_verifier(config.verifier)
    device = resolve_device(config.device)
    topology = resolve_topology(config.tree)
    target = open_checkpoint(resolve_model_path(config.model))
    dtype = resolve_dtype(config.dtype, device, target)
    if config.quantize and (reason := why_not(target, device)) is not None:
        raise ConfigError(
            f"quantize {config.quantize} needs the native forward: {reason}", hint="leave quantize out"
        )
    if target.reads_features:
        raise ConfigError(
            f"{config.model} is a draft that reads its target's hidden rows, and no model by itself",
            hint="name its target as the model, and this as the draft",
        )
    drafts = {
        name: borrow(name, open_checkpoint(draft_path(config.model, name)), target)
        for name in config.drafts
        if name != NGRAM
    }
    tokenizer = target.tokenizer()
    pairings = {name: pair(name, draft, target, tokenizer) for name, draft in drafts.items()}
    for name, pairing in pairings.items():
        logger.info("draft %s: %s", name, pairing.finding)
    max_position = target.config.max_position
    max_model_len = config.max_model_len or max_position
    if max_model_len > max_position:
        raise ConfigError(f"max_model_len is {max_model_len}, the model was made for {max_position}")
    return Resolved(
        config=config,
        verifier=verifier,
        topology=topology,
        device=device,
        dtype=dtype,
        target=target,
        tokenizer=tokenizer,
        drafts=drafts,
        pairings=pairings,
        max_model_len=max_model_len,
        max_tree_nodes=min(MAX_NODES, 1 + (topology.num_nodes - 1) * len(config.drafts)),
        num_slots=resolve_num_slots(config, [target, *drafts.values()], dtype, device, max_model_len),
    )


def load_models(resolved: Resolved) -> tuple[Loaded, dict[str, Loaded]]:
    """The target and the drafts by name. Raises ModelError."""
    config, dtype, device, num_slots = resolved.config, resolved.dtype, resolved.device, resolved.num_slots
    keep: Keep = "stored" if config.dtype == "auto" else "dtype"
    num_scratch = config.max_num_seqs * (resolved.max_tree_nodes + 1 + MAX_FORCED_TOKENS)
    target = load(
        config.model, resolved.target, dtype, config.quantize or keep, device, resolved.max_model_len,
        num_slots, num_scratch=0,
    )  # fmt: skip
    drafts = {
        name: load(
            name, draft, dtype, draft_keep(config, draft), device, resolved.draft_len(name), num_slots,
            num_scratch, may_be_native=isinstance(target.runner, NativeRunner) or not draft.reads_features,
        )
        for name, draft in resolved.drafts.items()
    }  # fmt: skip
    for draft in drafts.values():
        if draft.checkpoint.reads_features:
            read_features(draft, target)
    log_memory([target, *drafts.values()], num_slots, dtype, device)
    log_torch_path(target, device)
    return target, drafts


def read_features(draft: Loaded, target: Loaded) -> None:
    """Connect a feature draft with its target; `borrow` saw to it that this can be. Raises ModelError."""
    match draft.runner, target.runner:
        case NativeRunner() as own, NativeRunner() as above:
            own.read_features(above)
        case ModelRunner() as own, ModelRunner() as above:
            own.read_features(above, draft.checkpoint.weights.get(FEATURES))
        case _:
            raise ModelError(
                f"draft {draft.name} reads the rows of a target that runs natively, and "
                f"cannot run so itself: {why_not(draft.checkpoint, target.runner.pool.k[0].device)}",
                hint="SPECINFER_CPU=off runs both by torch",
            )


def draft_keep(config: EngineConfig, draft: Checkpoint) -> Keep:
    """Rounded weights change what is proposed, never what is written, so drafts may as well be fast: in full
    where all is asked for in float32."""
    if config.dtype == "float32":
        return "dtype"
    return "stored" if isinstance(draft.weights, GGUFFile) else "int8"


def assemble(resolved: Resolved, target: Loaded, drafts: dict[str, Loaded]) -> Engine:
    """An engine of loaded models. Raises ConfigError where the verifier does not suit a drafter."""
    config, topology = resolved.config, resolved.topology
    histories = {
        name: pairing.histories(drafts[name].runner.pool, resolved.draft_len(name))
        for name, pairing in resolved.pairings.items()
    }
    sharing = [drafts[name] for name, h in histories.items() if isinstance(h, SharedHistories)]
    allocator = SlotAllocator(resolved.num_slots)
    allocator.watch([loaded.runner.pool.filled for loaded in (target, *sharing)])
    prefix_cache = PrefixCache(allocator) if config.prefix_cache else None
    vocab_size = resolved.target.config.vocab_size
    # A request's rows of one step: one for each depth that is drafted, and one after the deepest.
    rows_per_request = 2 + (topology.max_depth if config.drafts else 0)
    chooser = Chooser(
        NoiseCache(vocab_size, resolved.device, max_rows=config.max_num_seqs * rows_per_request)
    )
    drafters: list[Drafter] = [
        NgramDrafter(lane=lane)
        if name == NGRAM
        else ModelDrafter(
            drafts[name].runner,
            chooser,
            kind=resolved.verifier.sampled_kind,
            vocab=resolved.pairings[name].vocab,
            histories=histories[name],
            target_vocab_size=vocab_size,
            max_position=resolved.draft_len(name),
            lane=lane,
        )
        for lane, name in enumerate(config.drafts)
    ]
    drafter: Drafter | None = EnsembleDrafter(drafters) if len(drafters) > 1 else next(iter(drafters), None)
    if drafter is not None:
        check_kinds(resolved.verifier, drafter.kinds)
    parts = Parts(
        scheduler=Scheduler(
            allocator,
            prefix_cache,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
        ),
        runner=target.runner,
        readers=[d.runner for d in drafts.values() if d.checkpoint.reads_features],
        chooser=chooser,
        verifier=resolved.verifier,
        drafter=drafter,
        topology=topology,
        planner=topology if isinstance(topology, Planner) else None,
        max_tree_nodes=resolved.max_tree_nodes,
        max_model_len=resolved.max_model_len,
        max_forced_tokens=MAX_FORCED_TOKENS,
        timer=StepTimer(),
    )
    tokenizer = resolved.tokenizer
    return Engine(
        parts,
        tokenizer,
        allocator,
        prefix_cache,
        vocab_size=vocab_size,
        end_token_ids=end_token_ids(resolved.target.path) if tokenizer is None else tokenizer.eos_token_ids,
        own_histories=[h for h in histories.values() if isinstance(h, OwnHistories)],
    )


def resolve_topology(tree: object) -> Topology:
    """Widths as text, "auto" for a Planner, or a Topology as it is. Raises ConfigError."""
    if tree == AUTO_TREE:
        return Planner()
    if isinstance(tree, str):
        return parse_topology(tree)
    sizes = (getattr(tree, name, None) for name in ("max_depth", "num_nodes"))
    if not callable(getattr(tree, "expand", None)) or not all(isinstance(size, int) for size in sizes):
        raise ConfigError(f"tree must be text or a Topology, got {tree!r}", hint='for example "3,2,1,1"')
    return cast(Topology, tree)


def resolve_device(name: str) -> torch.device:
    """ "auto" is cuda where there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not known", hint="use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but there is none", hint="use cpu or auto")
    return device


def resolve_dtype(name: str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """bfloat16 where the hardware computes in it or the native forward reads it, else float32."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    is_native = why_not(checkpoint, device) is None
    has_bf16 = device.type == "cuda" or is_native or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def resolve_num_slots(
    config: EngineConfig,
    checkpoints: Sequence[Checkpoint],
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> int:
    """Slots that the K/V memory holds."""
    per_slot = slot_bytes(checkpoints, dtype, device)
    if config.kv_memory is None:
        wanted = config.max_num_seqs * max_model_len
        return max(max_model_len + MAX_NODES, min(wanted, AUTO_KV_BYTES // per_slot))
    num_slots = config.kv_memory // per_slot
    if num_slots < 2:
        raise ConfigError(
            f"kv_memory of {config.kv_memory} bytes holds {num_slots} tokens",
            hint=f"one token takes {per_slot} bytes",
        )
    return num_slots


def slot_bytes(checkpoints: Sequence[Checkpoint], dtype: torch.dtype, device: torch.device) -> int:
    """What one token takes in the caches of all models."""
    return sum(
        bytes_per_slot(c.config.num_layers, c.config.num_kv_heads, c.config.head_dim, dtype)
        + c.reads_features * c.config.hidden_size * rows_dtype(dtype, device).itemsize
        for c in checkpoints
    )


def load(
    name: str,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    keep: Keep,
    device: torch.device,
    max_position: int,
    num_slots: int,
    num_scratch: int,
    *,
    may_be_native: bool = True,
) -> Loaded:
    """Weights, pool and runner of one model: native where that can be."""
    pool = make_pool(
        checkpoint.config, num_slots, dtype, device, num_scratch, reads_features=checkpoint.reads_features
    )
    level = wanted_level()
    if may_be_native and why_not(checkpoint, device) is None:
        native = NativeRunner(checkpoint, dtype, pool, max_position, keep=keep, level=level or "")
        model = native.model
        logger.info("%s: native, %s, %d threads", name, model.level, model.num_threads)
        return Loaded(name, checkpoint, native, model.num_bytes, model.weight_types)
    factory = LinearFactory(dtype, device)
    runner = make_torch_runner(checkpoint, factory, pool, max_position)
    return Loaded(name, checkpoint, runner, factory.num_bytes, (type_name(dtype),))


def log_torch_path(target: Loaded, device: torch.device) -> None:
    """One line where a CPU could do better than the torch path: a warning unless it was asked for."""
    reason = why_not(target.checkpoint, device)
    if device.type == "cpu" and reason is not None:
        level = logging.INFO if wanted_level() is None else logging.WARNING
        logger.log(level, "%s: the torch path, slower by half or more: %s", target.name, reason)


def log_memory(models: Sequence[Loaded], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
    """One table of what the weights, the drafts and the pools take."""
    lines = [f"{'model':24} {'weights MiB':>12} {'K/V MiB':>9}   ({dtype}, {device}, {num_slots} slots)"]
    for m in models:
        lines.append(
            f"{m.name[-24:]:24} {m.weight_bytes / 2**20:12.1f} {m.runner.pool.num_bytes / 2**20:9.1f}"
            f"   {', '.join(m.weight_types)}"
        )
    logger.info("memory:\n%s", "\n".join(lines))
