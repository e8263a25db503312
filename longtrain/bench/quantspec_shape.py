"""Speculation at the shape of a published model with random weights: all work is real, acceptance is given.

A cell decodes from a cache of so many tokens in captured cycles, as the engine does. The cache is filled with
random rows, or by reading a prompt of random ids.

Shapes: L layers, B batch, S cached tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.bench import steps
from longtrain.bench.eviction_theory import Sizes, gpu_called
from longtrain.bench.graphs import read_bytes_per_s
from longtrain.bench.quantspec_accept import Law, Replay
from longtrain.bench.quantspec_model import Forward, bound_ms, bytes_read, expected_ms
from longtrain.bench.report import gib, shorter
from longtrain.bench.timing import release
from longtrain.decoding.barred import Barred
from longtrain.decoding.captured import Stage, can_settle
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.phases import Phases
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.roles import Parts, TreeShape, onlooker
from longtrain.decoding.sampling import HashCoins, Sampling
from longtrain.errors import ConfigError, ConflictError, LongtrainError
from longtrain.log import get_logger
from longtrain.target.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.target.attention import Watch
    from longtrain.target.model import Target

log = get_logger(__name__)

FILLS = ("random", "prompt")
FULL, INT8 = "full", "INT8"
"""Caches: in the model's own numbers, or the hierarchical one as the target reads it."""


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Args:
        system: what decodes: `plain`, `longspec`, `quantspec`, ...
        cache: what it decodes from: `FULL` or `INT8`.
        shape: of the drafts.
        law: of the numbers accepted; None in plain decoding.
        forwards: of the target in a cycle, for the model; empty: there is none.
    """

    system: str
    cache: str
    shape: TreeShape = PLAIN
    law: Law | None = None
    forwards: tuple[Forward, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        cycles: counted.
        warmup: cycles before them, 2 or more: the first compiles, the second is recorded.
        fill: one of `FILLS`.
        seed: of ids, rows and the order of accepted numbers.
        sampling: processors.

    Raises:
        ConfigError: no such fill, or too few cycles.
    """

    cycles: int = 64
    warmup: int = 4
    fill: str = "random"
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise ConfigError(f"suite.fill={self.fill}; allowed: {', '.join(FILLS)}")
        if self.cycles < 1 or self.warmup < 2:
            raise ConfigError(
                f"suite.cycles={self.cycles} suite.warmup={self.warmup}; allowed: 1 or more counted, 2 or "
                "more before them"
            )


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        way: what decodes.
        context: tokens cached before.
        batch: sequences.
        split: take cycles apart too.
    """

    way: Way
    context: int
    batch: int = 1
    split: bool = False


@dataclass(frozen=True)
class Group:
    """Cells that decode with the same parts.

    Args:
        attach: makes draft and cache for a target.
        cells: measured in this order.
    """

    attach: Callable[[Target], Parts]
    cells: tuple[Cell, ...]


def run(
    target: Target,
    groups: Sequence[Group],
    settings: Settings,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measure all cells.

    Args:
        target: the model.
        groups: those without a cache of their own first, so that none is held while others are measured.
        settings: see `Settings`.
        keep: told the rows so far after every cell.
    """
    rows: list[dict[str, Any]] = []
    for group in groups:
        parts = group.attach(target)
        for cell in group.cells:
            rows.append(measure(target, parts, cell, settings))
            compare(rows)
            keep(rows)
        del parts
        _free(target.device)
    return rows


def compile_all(target: Target, groups: Sequence[Group], settings: Settings, *, threads: int) -> None:
    """Run two cycles of every cell once, so that nothing is compiled while another is timed.

    A cell that cannot run is passed over: measuring it says so.

    Args:
        target: of the same shape as the one measured; a single layer will do.
        groups: see `run`.
        settings: see `Settings`.
        threads: compiling side by side.
    """
    few = replace(settings, cycles=1, warmup=2, fill="random")

    @torch.no_grad()
    def once(group: Group, cell: Cell) -> None:
        try:
            phases = staged(target, group.attach(target), cell, few)
            for _ in range(2):
                phases()
        except (torch.OutOfMemoryError, LongtrainError) as error:
            log.info("not compiled: %s: %s", name_of(cell.way), str(error).splitlines()[0])

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for one in [pool.submit(once, group, cell) for group in groups for cell in group.cells]:
            one.result()
    _free(target.device)


@torch.no_grad()
def measure(target: Target, parts: Parts, cell: Cell, settings: Settings) -> dict[str, Any]:
    """Speed, memory and model of one cell; a row with `failed` where it cannot be measured.

    Args:
        target: the model.
        parts: draft and cache; in plain decoding the draft is not asked.
        cell: what to measure.
        settings: see `Settings`.
    """
    row = facts(cell)
    _free(target.device)
    try:
        row |= _measured(target, parts, cell, settings)
    except (torch.OutOfMemoryError, LongtrainError) as error:
        known = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        row["failed"] = known.splitlines()[0]
    row["weights_gib"] = gib(sum(param.nbytes for param in target.parameters()))
    if target.device.type == "cuda":
        row["peak_gib"] = gib(torch.cuda.max_memory_allocated(target.device))
    _free(target.device)
    shown = ("cycle_ms", "tokens_per_cycle", "tokens_per_s", "failed")
    about = " ".join(f"{key}={shorter(row[key])}" for key in shown if key in row)
    log.info("%s prompt_tokens=%d batch=%d %s", name_of(cell.way), cell.context, cell.batch, about)
    return row


def facts(cell: Cell) -> dict[str, Any]:
    """What a row is about."""
    way = cell.way
    row: dict[str, Any] = {
        "system": way.system,
        "cache": way.cache,
        "name": name_of(way),
        "shape": list(way.shape.widths),
        "drafted": way.shape.depth,
        "prompt_tokens": cell.context,
        "batch": cell.batch,
    }
    if way.law is not None:
        row["accepted"] = way.law.source | {"tokens_per_cycle": way.law.tokens_per_cycle}
    return row


def name_of(way: Way) -> str:
    """For people: what decodes, and what it drafts."""
    if not way.shape.widths:
        return f"{way.system}, {way.cache} cache"
    chain = set(way.shape.widths) == {1}
    drafted = f"{way.shape.depth}" if chain else "-".join(map(str, way.shape.widths))
    return f"{way.system} {drafted}"


@torch.no_grad()
def staged(target: Target, parts: Parts, cell: Cell, settings: Settings) -> Phases:
    """Cycles that stand right behind so many tokens.

    Args:
        target: the model.
        parts: draft and cache.
        cell: what to measure.
        settings: see `Settings`.

    Raises:
        ConflictError: such cycles cannot be captured, or a draft needs a prompt that was read.
    """
    way, context, batch = cell.way, cell.context, cell.batch
    shape, stage = way.shape, Stage(target)
    draft = parts.draft if shape.widths else None
    room = _steps(way, settings).room
    coins = torch.Generator().manual_seed(settings.seed + context)
    prompts = torch.randint(target.info.vocab_size, (batch, context), generator=coins).tolist()
    new_cache = parts.cache or stage.new_cache
    if settings.fill == "prompt":
        read = prefill(
            target,
            new_cache,
            prompts,
            max_new_tokens=room,
            nodes=shape.n_nodes,
            hidden=draft.want.hidden if draft else (),
            onlooker=onlooker(draft),
        )
        cache, step, tokens_BS, n_B = read.cache, read.step, read.tokens_BS, read.n_B
    else:
        if draft is not None and draft.want.hidden:
            raise ConflictError(
                f"the draft of '{parts.name}' starts from hidden states, which random rows do not have; pass "
                "suite.fill=prompt"
            )
        tokens_BS, n_B = pad(prompts, target.device)
        cache = new_cache(batch, context + room, shape.n_nodes)
        looking = onlooker(draft)
        watch = looking.watch_prompts([context] * batch) if looking else None
        fill(cache, target, n_B, context, seed=settings.seed, watch=watch)
        step = TargetStep(None, {})
    if not can_settle(cache) or (draft is not None and draft.tensors() is None):
        raise ConflictError(
            f"the cycles of parts '{parts.name}' cannot be captured, and so not measured here"
        )
    cache = stage.settle(cache, room=room + shape.n_nodes)
    if draft is not None:
        draft.start(tokens_BS, n_B, step, cache)
    barred = Barred((), 0, target.device)
    judge = _judge(way, batch, settings, target.device) if way.law is not None else None
    phases = Phases(target, cache, draft, shape, settings.sampling, barred, judge=judge)
    rows_B = torch.arange(batch, device=target.device)
    phases.begin(tokens_BS[:, -1], HashCoins(settings.seed, rows_B), room)
    return phases


def _judge(way: Way, batch: int, settings: Settings, device: torch.device) -> Replay:
    """Numbers for each sequence, so that the counted cycles begin with the first."""
    assert way.law is not None
    seeds = [settings.seed + 1000003 * row for row in range(batch)]
    accepted = [*zip(*(way.law.lengths(settings.cycles, seed) for seed in seeds), strict=True)]
    first = -settings.warmup % len(accepted)
    return Replay(accepted[first:] + accepted[:first], way.shape, device)


def _free(device: torch.device) -> None:
    """Give back what the last cell had, where memory is what cells are measured by."""
    if device.type == "cuda":
        release(device)


def _steps(way: Way, settings: Settings) -> steps.Settings:
    return steps.Settings(way.shape, settings.sampling, settings.cycles, settings.warmup)


@torch.no_grad()
def fill(
    cache: KVCache, target: Target, n_B: Tensor, context: int, *, seed: int, watch: Watch | None = None
) -> None:
    """Random keys and values of `context` tokens, the same in all layers, as if prompts had been read.

    Args:
        cache: empty.
        target: for its sizes.
        n_B: the context, once a sequence.
        context: tokens.
        seed: of the rows.
        watch: sees them, and queries.
    """
    info = target.info
    coins = torch.Generator(device=target.device).manual_seed(seed)

    def random(heads: int) -> Tensor:
        size = (len(n_B), heads, context, info.head_dim)
        return torch.randn(size, generator=coins, device=target.device, dtype=target.dtype)

    k, v = random(info.n_kv_heads), random(info.n_kv_heads)
    q = None if watch is None else random(info.n_heads)
    cache.expect(None)
    for layer in range(info.n_layers):
        cache.write(layer, k, v)
        if watch is not None and q is not None:
            watch(layer, q, k, v)
    cache.commit(None, n_B)


def _measured(target: Target, parts: Parts, cell: Cell, settings: Settings) -> dict[str, Any]:
    phases = staged(target, parts, cell, settings)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(target.device)  # what was needed to fill the cache does not count
    how, draft = _steps(cell.way, settings), phases.draft
    found: dict[str, Any] = steps.whole(phases, how)
    found |= {
        "cache_gib": gib(phases.cache.bytes()),
        "cache_bytes_per_token": phases.cache.bytes() / (cell.batch * cell.context),
        "draft_gib": gib(draft.bytes()) if draft else 0.0,
    }
    if cell.split:
        found["steps"] = steps.split(phases, how)
    return found | _model(target, cell, found["cycle_ms"])


def _model(target: Target, cell: Cell, cycle_ms: float) -> dict[str, Any]:
    """What the cycle should take and its bound on this GPU; nothing elsewhere, or for drafts without one."""
    gpu = gpu_called(torch.cuda.get_device_name(target.device)) if target.device.type == "cuda" else None
    if gpu is None or not cell.way.forwards:
        return {}
    size, forwards = Sizes.of(target.info), list(cell.way.forwards)
    sizes = {"batch": cell.batch, "context": cell.context}
    read = read_bytes_per_s(target.device)
    expected = expected_ms(forwards, size, **sizes, bytes_per_s=read)
    bound = bound_ms(forwards, size, gpu, **sizes)
    return {
        "gpu": gpu.name,
        "read_tb_per_s": read * 1e-12,
        "read_share": 1e3 * bytes_read(forwards, size, **sizes) / read / cycle_ms,
        "expected_ms": expected,
        "expected_over_taken": expected / cycle_ms,
        "roofline_ms": bound,
        "roofline_share": bound / cycle_ms,
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Speed and cache of each row over those of plain decoding of the same context and batch; in place.

    A row that decodes from the INT8 cache is compared with plain decoding from either.
    """

    def base(row: dict[str, Any], cache: str) -> dict[str, Any] | None:
        same = ("prompt_tokens", "batch")
        return next(
            (
                one
                for one in rows
                if (one["system"], one["cache"]) == ("plain", cache)
                and all(one[key] == row[key] for key in same)
                and "tokens_per_s" in one
            ),
            None,
        )

    for row in rows:
        if "tokens_per_s" not in row:
            continue
        if (plain := base(row, FULL)) is not None:
            row["speed"] = row["tokens_per_s"] / plain["tokens_per_s"]
            row["cache_share"] = row["cache_gib"] / plain["cache_gib"]
            if "expected_ms" in row and "expected_ms" in plain:
                faster = plain["expected_ms"] / row["expected_ms"]
                row["expected_speed"] = faster * row["tokens_per_cycle"] / plain["tokens_per_cycle"]
        if row["cache"] == INT8 and (plain := base(row, INT8)) is not None:
            row["int8_speed"] = row["tokens_per_s"] / plain["tokens_per_s"]
