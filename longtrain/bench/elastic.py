"""Steps of sparse decoding with rows on the GPU and on the host, and what moves between them.

Sets of rows change from step to step by a given share, so no head needs to be trained; which rows come anew
is random, so they lie scattered, as they do for a head. A step is timed as a CUDA graph; on a CPU as it is.

Shapes: B batch, X sets, K rows of a set, S rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from longtrain.bench import clock
from longtrain.bench.cycles import CycleCounts, random_ids, random_states, ready
from longtrain.bench.suites import Bench, Context, Row, shape_keys
from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.named import cache_maker
from longtrain.cache.row_sets import ReadBudget, RowSets
from longtrain.cache.selected import SelectedCache
from longtrain.cache.slots import SlotMap
from longtrain.costs.hardware import GIB
from longtrain.decoding.captured import Cycles
from longtrain.decoding.evict import Budget
from longtrain.decoding.phases import Phases
from longtrain.decoding.prefill import pad
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.settings import Count, CountOrZero, Counts, Lengths, OneOf, Positive, Share, Tokens, within
from longtrain.systems import parse
from longtrain.tables import of_rows
from longtrain.targets.model import Target
from longtrain.targets.step import TargetStep

PLAIN = TreeShape(())
RESIDENT_GIB = 2.0**20
"""A cap that nothing meets: every layer stays on the device."""
MODES = {
    "gpu": Offloading(memory_gib=RESIDENT_GIB),
    "sync_all": Offloading(prefetch=False, difference=False),
    "sync_difference": Offloading(prefetch=False),
    "async_all": Offloading(difference=False),
    "async_difference": Offloading(),
}
"""Where rows are and how they come: all resident; on the host, all of a set or what is new of it, before the
step or on a side stream."""
COLUMNS = {
    "tokens": "tokens",
    "rows": "rows",
    "system": "system",
    "step ms": "step_ms.median",
    "p99": "p99_ms",
    "of full": "of_full",
    "of rows on the GPU": "of_gpu",
    "MB moved a step": "moved_mb",
    "hidden": "hidden",
}
TRAFFIC_COLUMNS = {
    "tokens": "tokens",
    "rows": "rows",
    "rows kept": "overlap",
    "moved of a full reload": "difference_share",
    "LRU of twice the rows": "lru_share",
    "gather GB/s": "gather_gb_s",
    "copy GB/s": "copy_gb_s",
    "gather of copy": "gather_share",
    "choose ms": "choose_ms.median",
    "scores ms": "head_ms.median",
}
GROWTH_COLUMNS = {
    "tokens": "tokens",
    "layers on the host": "on_host",
    "step ms": "step_ms.median",
    "p99": "p99_ms",
    "of the step before": "of_before",
}


@dataclass(frozen=True)
class ElasticSettings:
    """The keys of `suite=elastic`.

    Args:
        shape: a published shape with random weights, or the keys of a `config.json`.
        lengths: tokens in the cache.
        budgets: rows that a KV head reads at each step.
        overlap: share of a set's rows that are chosen again at the next step.
        sinks: first rows that are always read.
        window: last rows that are always read.
        batch: sequences.
        modes: which of `MODES` are timed.
        steps: steps counted.
        warmup: steps before them.
        growth: lengths at which steps are timed under a cap, ascending; empty: none.
        growth_gib: that cap, in GiB of keys and values on the device.
    """

    shape: str | dict[str, Any]
    lengths: Lengths
    budgets: Counts
    overlap: Share = 0.65
    sinks: CountOrZero = 4
    window: CountOrZero = 64
    batch: Count = 1
    modes: tuple[Annotated[str, OneOf(*MODES)], ...] = tuple(MODES)
    steps: Count = 64
    warmup: Annotated[int, within(2)] = 4
    growth: tuple[Tokens, ...] = ()
    growth_gib: Positive = 1.0

    def __post_init__(self) -> None:
        if list(self.growth) != sorted(set(self.growth)):
            raise ConfigError(f"suite.growth={list(self.growth)}; allowed: lengths, ascending")


class OverlapSelector(Selector):
    """Chooses a given share of the rows of the last set again, and others at random.

    Args:
        budget: see `Selector`.
        target: whose layers share a set for each KV head.
        overlap: the share.
    """

    name = "overlap"

    def __init__(self, budget: ReadBudget, target: Target, overlap: float) -> None:
        super().__init__(budget)
        info = target.info
        self.table_LG = torch.arange(info.n_kv_heads).expand(info.n_layers, -1)
        self.overlap = overlap

    def ahead(self, root_B: Tensor) -> Tensor:
        """See `Selector`."""
        assert self.cache is not None and self.cache.row_sets is not None
        sets = self.cache.row_sets
        return overlapping(sets.idx_BXK, sets.n_B, self.cache.used, self.overlap)

    def tensors(self) -> tuple[Tensor, ...]:
        """It has no state but the sets."""
        return ()


def overlapping(idx_BXK: Tensor, n_B: Tensor, rows: int, overlap: float) -> Tensor:
    """Scores by which a share of some sets is chosen again, and other rows at random."""
    B, X, K = idx_BXK.shape
    scores_BXS = torch.rand(B, X, rows + 1, device=idx_BXK.device)
    again_BXK = torch.where(torch.rand(B, X, K, device=idx_BXK.device) < overlap, 2.0, -1.0)
    counts_BXK = (torch.arange(K, device=idx_BXK.device) < n_B[:, None, None]).expand(B, X, K)
    return scores_BXS.scatter_(2, torch.where(counts_BXK, idx_BXK, rows), again_BXK)[..., :rows]


class LruBuffer:
    """Counts what a buffer of a set's latest rows would load: the rows used least lately make room.

    Args:
        batch: sequences.
        n_sets: sets of each.
        slots: rows that the buffer of a set holds, at least those of a set.
        rows: S.
        device: where it counts.

    Source: SGLang's hierarchical sparse cache (device_buffer_size, by default twice the rows of a set).
    """

    def __init__(self, batch: int, n_sets: int, slots: int, *, rows: int, device: torch.device) -> None:
        self.slots, self._step = min(slots, rows), 0
        self._used_BXS = torch.full((batch, n_sets, rows), -1, dtype=torch.int64, device=device)

    def use(self, idx_BXK: Tensor, n_B: Tensor) -> int:
        """Take in the sets of a step, and say how many rows were not there; waits for the device."""
        B, X, K = idx_BXK.shape
        rows = self._used_BXS.shape[-1]
        order_BXS = self._used_BXS * rows + torch.arange(rows, device=idx_BXK.device)
        held_BXK = order_BXS.topk(self.slots, -1).indices
        here_BXS = torch.zeros_like(self._used_BXS, dtype=torch.bool).scatter_(2, held_BXK, True)
        here_BXS &= self._used_BXS >= 0
        counts_BXK = (torch.arange(K, device=idx_BXK.device) < n_B[:, None, None]).expand(B, X, K)
        missing = int((counts_BXK & ~here_BXS.gather(2, idx_BXK)).sum())
        used = torch.nn.functional.pad(self._used_BXS, (0, 1))
        used.scatter_(2, torch.where(counts_BXK, idx_BXK, rows), self._step)
        self._used_BXS, self._step = used[..., :rows], self._step + 1
        return missing


def run(settings: ElasticSettings, context: Context) -> Iterator[Row]:
    """Rows of steps, then of what is moved, for each length and budget; then of a growing text.

    Raises:
        ConfigError: a budget that leaves nothing to choose.
    """
    keys = shape_keys(settings.shape)
    budgets = {rows: ReadBudget(rows, settings.sinks, settings.window) for rows in settings.budgets}
    target = context.random_target(keys)
    for length in settings.lengths:
        about: Row = {"tokens": length, "system": "full"}
        full = clock.filled(about, _full(target, length, settings), context.device)
        yield full
        for budget in budgets.values():
            yield from _modes(target, length, budget, settings, full)
            about = {"tokens": length, "rows": budget.rows, "kind": "traffic"}
            yield clock.filled(about, _moves(target, length, budget, settings, context), context.device)
    if settings.growth:
        yield from _growth(target, next(iter(budgets.values())), settings)


def _full(target: Target, length: int, settings: ElasticSettings) -> Iterator[Row]:
    """Plain decoding over all rows."""
    counts = CycleCounts(settings.steps, settings.warmup, read=False)
    prompts = random_ids(target.info.vocab_size, settings.batch, length, seed=length)
    yield _steps(ready(target, Parts(), prompts, PLAIN, counts), settings)


def _modes(
    target: Target, length: int, budget: ReadBudget, settings: ElasticSettings, full: Row
) -> Iterator[Row]:
    """Sparse decoding in every mode; the share hidden is of what the same moves add before a step."""
    found: dict[str, Row] = {}
    for mode in settings.modes:
        about = {"tokens": length, "rows": budget.rows, "system": mode}
        row = clock.filled(about, _mode(target, length, budget, mode, settings), target.device)
        if "step_ms" in row:
            found[mode] = row
            ms = row["step_ms"]["median"]
            if "step_ms" in full:
                row["of_full"] = ms / full["step_ms"]["median"]
            gpu, sync = found.get("gpu"), found.get(mode.replace("async", "sync"))
            if gpu:
                row["of_gpu"] = ms / gpu["step_ms"]["median"]
            if gpu and sync and mode.startswith("async"):
                added = sync["step_ms"]["median"] - gpu["step_ms"]["median"]
                row["hidden"] = 1 - (ms - gpu["step_ms"]["median"]) / added if added > 0 else None
        yield row


def _mode(
    target: Target, length: int, budget: ReadBudget, mode: str, settings: ElasticSettings
) -> Iterator[Row]:
    phases, cache = _sparse(target, length, budget, MODES[mode], settings)
    before: list[int] = []
    row = _steps(phases, settings, warm=lambda: before.append(cache.moved_bytes))
    row["moved_mb"] = (cache.moved_bytes - before[0]) / settings.steps / 1e6
    row["device_gib"] = (cache.bytes() - cache.host_bytes) / GIB
    yield row


def _sparse(
    target: Target,
    length: int,
    budget: ReadBudget,
    offloading: Offloading,
    settings: ElasticSettings,
    *,
    grows: int = 0,
) -> tuple[Phases, ElasticCache]:
    """Cycles behind a text of random rows."""
    info = target.info
    names = ("n_layers", "n_heads", "n_kv_heads", "head_dim")
    shape: dict[str, Any] = {name: getattr(info, name) for name in names}
    maker = cache_maker("elastic", vars(offloading), **shape, device=target.device, dtype=target.dtype)
    selector = OverlapSelector(budget, target, settings.overlap)
    parts = Parts(cache=maker, selector=selector, name="overlap")
    prompts = random_ids(info.vocab_size, settings.batch, length, seed=length)
    counts = CycleCounts(settings.steps + grows, settings.warmup, read=False)
    phases = ready(target, parts, prompts, PLAIN, counts)
    assert isinstance(phases.cache, ElasticCache)
    return phases, phases.cache


@torch.no_grad()
def _steps(phases: Phases, settings: ElasticSettings, *, warm: Any = lambda: None) -> Row:
    """Spread and 99th percentile of the milliseconds of a step; `warm` is called before those that count."""
    cycles, device = Cycles(phases, captured=True), phases.target.device
    for _ in range(settings.warmup):
        cycles.run()
    warm()
    return _timed(cycles, settings.steps, device)


def _timed(cycles: Cycles, steps: int, device: torch.device) -> Row:
    watches = [clock.watched(cycles.run, device) for _ in range(steps)]
    clock.wait(device)
    ms = sorted(1e3 * watch.seconds() for watch in watches)
    return {"step_ms": clock.spread(ms), "p99_ms": ms[min(len(ms) - 1, int(0.99 * len(ms)))]}


def _moves(
    target: Target, length: int, budget: ReadBudget, settings: ElasticSettings, context: Context
) -> Iterator[Row]:
    """What is moved, how fast, and what choosing takes."""
    yield _traffic(target, length, budget, settings)
    yield _gather(target, length, budget, settings)
    if context.method is not None:
        yield _head(target, length, budget, settings, context)


@torch.no_grad()
def _traffic(target: Target, length: int, budget: ReadBudget, settings: ElasticSettings) -> Row:
    """Rows moved, as shares of all rows of the sets: by the difference of sets, and by an LRU buffer."""
    B, X, K, device = settings.batch, target.info.n_kv_heads, budget.rows, target.device
    rows, steps = length + settings.steps + 1, settings.steps
    sets, slots = RowSets(budget, B, X, device), SlotMap(B, X, K, rows=rows, most_moved=K, device=device)
    lru = LruBuffer(B, X, 2 * K, rows=rows, device=device)
    len_B = torch.full((B,), length, dtype=torch.int64, device=device)
    moved = kept = loaded = wanted = 0
    for step in range(steps + 1):
        before = sets.idx_BXK.clone()
        sets.open(len_B)
        sets.put(overlapping(sets.idx_BXK, sets.n_B if step else 0 * sets.n_B, rows, settings.overlap))
        slots.change(sets.idx_BXK, sets.n_B, sets.due_B)
        missing = lru.use(sets.idx_BXK, sets.n_B)
        if step:  # the first sets come in full
            moved, loaded = moved + int(slots.n_BX.sum()), loaded + missing
            kept += sum(
                int(torch.isin(sets.idx_BXK[b, x], before[b, x]).sum()) for b in range(B) for x in range(X)
            )
            wanted += B * X * K
        len_B = len_B + 1
    return {"overlap": kept / wanted, "difference_share": moved / wanted, "lru_share": loaded / wanted}


@torch.no_grad()
def _gather(target: Target, length: int, budget: ReadBudget, settings: ElasticSettings) -> Row:
    """Bandwidth of the gather kernel over whole sets of all layers, beside a copy of pinned memory."""
    phases, cache = _sparse(target, length, budget, MODES["sync_all"], settings)
    phases.select()
    device, info = target.device, target.info
    size = info.n_layers * settings.batch * info.n_kv_heads * budget.rows * cache.row_bytes
    gather = clock.repeated(cache.load, device, warmup=2, repeats=7)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    goal = torch.empty(size, dtype=torch.uint8, device=device)
    copy = clock.repeated(lambda: goal.copy_(host, non_blocking=True), device, warmup=2, repeats=7)
    speeds = [
        size / 1e6 / clock.spread([one.device_ms or one.wall_ms for one in runs])["median"]
        for runs in (gather, copy)
    ]
    found: Row = {"gather_gb_s": speeds[0], "copy_gb_s": speeds[1], "gather_share": speeds[0] / speeds[1]}
    found["choose_ms"] = clock.replayed(lambda _: phases.select(), device, calls=1, repeats=20)  # none is due
    return found


@torch.no_grad()
def _head(
    target: Target, length: int, budget: ReadBudget, settings: ElasticSettings, context: Context
) -> Row:
    """Milliseconds of scoring all rows by what `method` brings, with random weights if it is trained.

    Raises:
        ConfigError: it scores no rows before the forward.
    """
    assert context.method is not None
    entry = parse({"method": dict(context.method), "sinks": budget.sinks, "window": budget.window})
    (system,) = context.systems(target, entry, budgets=[Budget(budget.rows)])
    head = system.parts.selector
    if head is None or head.table_LG is None:
        raise ConfigError(f"method={context.method['name']} scores no rows before the forward; leave it out")
    cache = target.new_cache(settings.batch, length, 1)
    cache.rewind([length] * settings.batch)
    tokens = random_ids(target.info.vocab_size, settings.batch, length, seed=length)
    tokens_BS, n_B = pad(tokens, target.device)
    step = TargetStep(None, random_states(target, head, settings.batch, length, seed=0))
    head.start(tokens_BS, n_B, step, SelectedCache(cache))
    root_B = tokens_BS[:, -1].clone()
    return {"head_ms": clock.replayed(lambda _: head.ahead(root_B), target.device, calls=1, repeats=20)}


@torch.no_grad()
def _growth(target: Target, budget: ReadBudget, settings: ElasticSettings) -> Iterator[Row]:
    """Steps at growing lengths under a cap. Rows between two lengths count as committed, and are zeros."""
    offloading = replace(Offloading(), memory_gib=settings.growth_gib)
    first, last = settings.growth[0], settings.growth[-1]
    phases, cache = _sparse(target, first, budget, offloading, settings, grows=last - first)
    cycles, before = Cycles(phases, captured=True), None
    for length in settings.growth:
        cache.make_room(length + settings.warmup + settings.steps + 1)
        cache.len_B.fill_(length)
        for _ in range(settings.warmup):
            cycles.run()
        row: Row = {"tokens": length, "kind": "growth", "on_host": len(cache.offloaded)}
        row |= _timed(cycles, settings.steps, target.device)
        ms = row["step_ms"]["median"]
        yield row | {"of_before": None if before is None else ms / before}
        before = ms


def report(rows: Sequence[Row], settings: ElasticSettings, context: Context) -> str:
    """A table of steps, one of what is moved, and one of a growing text."""
    kinds = {None: COLUMNS, "traffic": TRAFFIC_COLUMNS, "growth": GROWTH_COLUMNS}
    own = {kind: [row for row in rows if row.get("kind") == kind] for kind in kinds}
    return "\n\n".join(of_rows(own[kind], columns) for kind, columns in kinds.items() if own[kind])


BENCH = Bench(settings=ElasticSettings, run=run, report=report)
