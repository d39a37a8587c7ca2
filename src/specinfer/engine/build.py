"""From an EngineConfig to an Engine: the one place where "auto" is resolved, and logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from specinfer.cache import PrefixCache, SlotAllocator
from specinfer.cache.pool import bytes_per_slot
from specinfer.config import AUTO_TREE, EngineConfig
from specinfer.draft.drafter import Drafter
from specinfer.draft.ensemble import EnsembleDrafter
from specinfer.draft.history import OwnHistories, SharedHistories
from specinfer.draft.model import ModelDrafter
from specinfer.draft.ngram import NgramDrafter
from specinfer.draft.pairing import pair
from specinfer.draft.planner import Planner
from specinfer.engine.engine import Engine
from specinfer.engine.parts import Parts
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import ConfigError
from specinfer.metrics import StepTimer
from specinfer.models.catalog import draft_path, resolve_model_path
from specinfer.models.linear import LinearFactory
from specinfer.models.loader import Checkpoint, open_checkpoint
from specinfer.runtime import Runner, make_pool, make_torch_runner
from specinfer.runtime.kept import Keep, type_name
from specinfer.runtime.native import NativeRunner, wanted_level, why_not
from specinfer.sampling.chooser import Chooser
from specinfer.sampling.noise import NoiseCache
from specinfer.tree import Topology, parse_topology
from specinfer.tree.token_tree import MAX_NODES
from specinfer.verify import check_kinds, get_verifier

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


def build_engine(config: EngineConfig) -> Engine:
    """Load everything. Every error that needs no weights is raised before any is read."""
    verifier = get_verifier(config.verifier)
    device = resolve_device(config.device)
    topology = resolve_topology(config.tree)
    checkpoint = open_checkpoint(resolve_model_path(config.model))
    dtype = resolve_dtype(config.dtype, device, checkpoint)
    keep: Keep = "stored" if config.dtype == "auto" else "dtype"
    if config.quantize and (reason := why_not(checkpoint, device)) is not None:
        raise ConfigError(
            f"quantize {config.quantize} needs the native forward: {reason}", hint="leave quantize out"
        )
    draft_checkpoints = {
        name: open_checkpoint(draft_path(config.model, name)) for name in config.drafts if name != NGRAM
    }
    tokenizer = checkpoint.tokenizer()
    pairings = {name: pair(name, draft, checkpoint, tokenizer) for name, draft in draft_checkpoints.items()}
    for name, pairing in pairings.items():
        logger.info("draft %s: %s", name, pairing.finding)
    max_model_len = min(
        config.max_model_len or checkpoint.config.max_position, checkpoint.config.max_position
    )
    if config.max_model_len and config.max_model_len > checkpoint.config.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, "
            f"the model was made for {checkpoint.config.max_position}"
        )
    max_tree_nodes = min(MAX_NODES, getattr(topology, "num_nodes", MAX_NODES)) if config.drafts else 1
    max_tree_nodes = min(MAX_NODES, 1 + (max_tree_nodes - 1) * max(1, len(config.drafts)))
    num_slots = resolve_num_slots(config, [checkpoint, *draft_checkpoints.values()], dtype, max_model_len)
    num_scratch = config.max_num_seqs * (max_tree_nodes + 1 + MAX_FORCED_TOKENS)

    target = load(
        config.model,
        checkpoint,
        dtype,
        config.quantize or keep,
        device,
        max_model_len,
        num_slots,
        num_scratch=0,
    )
    draft_lens = {name: min(max_model_len, c.config.max_position) for name, c in draft_checkpoints.items()}
    drafts = {
        name: load(name, c, dtype, keep, device, draft_lens[name], num_slots, num_scratch)
        for name, c in draft_checkpoints.items()
    }
    log_memory([target, *drafts.values()], num_slots, dtype, device)
    log_torch_path(target, device)

    histories = {
        name: pairing.histories(drafts[name].runner.pool, draft_lens[name])
        for name, pairing in pairings.items()
    }
    own_histories = [h for h in histories.values() if isinstance(h, OwnHistories)]
    sharing = [drafts[name] for name, h in histories.items() if isinstance(h, SharedHistories)]
    allocator = SlotAllocator(num_slots)
    allocator.watch([loaded.runner.pool.filled for loaded in (target, *sharing)])
    prefix_cache = PrefixCache(allocator) if config.prefix_cache else None
    vocab_size = checkpoint.config.vocab_size
    # A request's rows of one step: one for each depth that is drafted, and one after the deepest.
    rows_per_request = 2 + (topology.max_depth if config.drafts else 0)
    chooser = Chooser(NoiseCache(vocab_size, device, max_rows=config.max_num_seqs * rows_per_request))
    drafters = [
        NgramDrafter(lane=lane)
        if name == NGRAM
        else ModelDrafter(
            drafts[name].runner,
            chooser,
            kind=verifier.sampled_kind,
            vocab=pairings[name].vocab,
            histories=histories[name],
            target_vocab_size=vocab_size,
            max_position=draft_lens[name],
            lane=lane,
        )
        for lane, name in enumerate(config.drafts)
    ]
    drafter: Drafter | None = None
    if drafters:
        drafter = drafters[0] if len(drafters) == 1 else EnsembleDrafter(drafters)
        check_kinds(verifier, drafter.kinds)
    parts = Parts(
        scheduler=Scheduler(
            allocator,
            prefix_cache,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
        ),
        runner=target.runner,
        chooser=chooser,
        verifier=verifier,
        drafter=drafter,
        topology=topology,
        planner=topology if isinstance(topology, Planner) else None,
        max_tree_nodes=max_tree_nodes,
        max_model_len=max_model_len,
        max_forced_tokens=MAX_FORCED_TOKENS,
        timer=StepTimer(),
    )
    return Engine(
        parts, tokenizer, allocator, prefix_cache, vocab_size=vocab_size, own_histories=own_histories
    )


def resolve_topology(tree: object) -> Topology:
    """Widths as text, "auto" for a Planner, or a Topology as it is. Raises ConfigError."""
    if tree == AUTO_TREE:
        return Planner()
    if isinstance(tree, str):
        return parse_topology(tree)
    if not callable(getattr(tree, "expand", None)) or not isinstance(getattr(tree, "max_depth", None), int):
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
    config: EngineConfig, checkpoints: Sequence[Checkpoint], dtype: torch.dtype, max_model_len: int
) -> int:
    """Slots that the K/V memory holds."""
    per_slot = sum(
        bytes_per_slot(c.config.num_layers, c.config.num_kv_heads, c.config.head_dim, dtype)
        for c in checkpoints
    )
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


def load(
    name: str,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    keep: Keep,
    device: torch.device,
    max_position: int,
    num_slots: int,
    num_scratch: int,
) -> Loaded:
    """Weights, pool and runner of one model: native where that can be."""
    pool = make_pool(checkpoint.config, num_slots, dtype, device, num_scratch)
    level = wanted_level()
    reason = why_not(checkpoint, device)
    if reason is None:
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
