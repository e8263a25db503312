"""Transfers of sparse decoding: amount and bandwidth, and the time of scoring and selecting KV entries.

Shapes: B batch, X sets, K KV entries of a set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks import replay
from benchmarks.cycles import random_states
from benchmarks.elastic.overlap import overlapping
from benchmarks.elastic.settings import MODES, ElasticSettings
from benchmarks.elastic.steps import sparse
from longtrain import methods
from longtrain.bench import clock
from longtrain.bench.suites import Context, Row, random_ids
from longtrain.cache.elastic import Offloading
from longtrain.cache.entry_sets import EntrySets, ReadBudget
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.evict import Budget
from longtrain.decoding.prefill import pad
from longtrain.decoding.retrieval.lru import LruBuffer
from longtrain.decoding.retrieval.selector import Selector
from longtrain.errors import ConfigError
from longtrain.kernels.slot_assignment import SlotMap
from longtrain.systems import parse
from longtrain.targets.model import Target
from longtrain.targets.step import TargetStep

COLUMNS = {
    "tokens": "tokens",
    "rows": "rows",
    "layers side by side": "side_by_side",
    "rows kept": "overlap",
    "MB of all rows": "whole_mb",
    "moved of them": "difference_share",
    "by an LRU buffer of twice the rows": "lru_share",
    "gather GB/s": "gather_gb_s",
    "copy GB/s": "copy_gb_s",
    "gather of copy": "gather_share",
    "scores ms": "head_ms.median",
    "choice ms": "choose_ms.median",
    "of a step": "selection_share",
    "slots ms": "slots_ms.median",
}


def measure(
    target: Target,
    length: int,
    budget: ReadBudget,
    settings: ElasticSettings,
    context: Context,
    *,
    side_by_side: int,
) -> Iterator[Row]:
    """Yield the metrics of one row, part by part: gather bandwidth, transferred share, selection time.

    Only the first depends on the number of contiguous layers; the others are measured once.
    """
    yield _gather(target, length, budget, settings, replace(MODES["sync_all"], side_by_side=side_by_side))
    if side_by_side != settings.side_by_side[0]:
        return
    yield _moved(target, length, budget, settings)
    yield _choose(target, length, budget, settings)
    if context.method is not None:
        yield _head(target, length, scorer(target, budget, context), settings)


def selection(row: Row, step_ms: float | None) -> Row:
    """Add the share of a step spent on scoring and selection, if all three times are known."""
    if step_ms is not None and "head_ms" in row and "choose_ms" in row:
        row["selection_share"] = (row["head_ms"]["median"] + row["choose_ms"]["median"]) / step_ms
    return row


@torch.no_grad()
def _moved(target: Target, length: int, budget: ReadBudget, settings: ElasticSettings) -> Row:
    """Return the transferred share of the sets' entries: by set difference, and with an LRU buffer."""
    B, X, K, device = settings.batch, target.info.n_kv_heads, budget.rows, target.device
    rows, steps = length + settings.steps + 1, settings.steps
    sets, slots = EntrySets(budget, B, X, device), SlotMap(B, X, K, most_moved=K, device=device)
    lru = LruBuffer(B, X, 2 * K, rows=rows, device=device)
    len_B = torch.full((B,), length, dtype=torch.int64, device=device)
    moved = kept = loaded = wanted = 0
    for step in range(steps + 1):
        before = sets.idx_BXK.clone()
        sets.open(len_B)
        sets.put(overlapping(sets.idx_BXK, sets.n_B if step else 0 * sets.n_B, rows, settings.overlap))
        slots.change(sets.idx_BXK, sets.n_B, sets.due_B)
        missing = int(lru.use(sets.idx_BXK, sets.n_B).sum())
        if step:  # the first sets are transferred in full
            moved, loaded = moved + int(slots.n_BX.sum()), loaded + missing
            kept += sum(
                int(torch.isin(sets.idx_BXK[b, x], before[b, x]).sum()) for b in range(B) for x in range(X)
            )
            wanted += B * X * K
        len_B = len_B + 1
    info = target.info
    whole = info.n_layers * B * X * K * 2 * info.head_dim * target.dtype.itemsize
    return {
        "overlap": kept / wanted,
        "whole_mb": whole / 1e6,
        "difference_share": moved / wanted,
        "lru_share": loaded / wanted,
    }


@torch.no_grad()
def _gather(
    target: Target, length: int, budget: ReadBudget, settings: ElasticSettings, offloading: Offloading
) -> Row:
    """Measure the gather kernel's bandwidth over whole sets of all layers, and a pinned-memory copy's."""
    decode_step, cache = sparse(target, length, budget, offloading, settings)
    decode_step.select()
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
    return {"gather_gb_s": speeds[0], "copy_gb_s": speeds[1], "gather_share": speeds[0] / speeds[1]}


@torch.no_grad()
def _choose(target: Target, length: int, budget: ReadBudget, settings: ElasticSettings) -> Row:
    """Time the selection by scores, and the assignment of transferred entries to slots, in milliseconds."""
    B, X, K, device = settings.batch, target.info.n_kv_heads, budget.rows, target.device
    sets, slots = EntrySets(budget, B, X, device), SlotMap(B, X, K, most_moved=K, device=device)
    scores = [torch.rand(B, X, length, device=device) for _ in range(2)]
    len_B = torch.full((B,), max(length // 2, length - 64), dtype=torch.int64, device=device)

    def choose(call: int) -> None:
        len_B.add_(1)  # or no transfer would be needed
        sets.open(len_B)
        sets.put(scores[call % 2])

    found = {"choose_ms": replay.replayed(choose, device, calls=2, repeats=20)}
    chosen = []
    for call in range(2):
        choose(call)
        chosen.append(sets.idx_BXK.clone())

    def find(call: int) -> None:
        slots.change(chosen[call % 2], sets.n_B, sets.due_B)

    return found | {"slots_ms": replay.replayed(find, device, calls=2, repeats=20)}


def scorer(target: Target, budget: ReadBudget, context: Context) -> Selector:
    """Return the selector of `method`, with random weights if it is a trained one.

    Raises:
        ConfigError: it does not score KV entries before the forward, or does not support the target.
    """
    assert context.method is not None
    name = str(context.method["name"])
    refused = ConfigError(f"method={name} scores no rows before the forward; leave it out")
    if "sinks" not in methods.get(name).inference_keys:
        raise refused
    entry = parse({"method": dict(context.method), "sinks": budget.sinks, "window": budget.window})
    (system,) = context.systems(target, entry, budgets=[Budget(budget.rows)])
    head = system.parts.selector
    if head is None or head.table_LG is None:
        raise refused
    return head


@torch.no_grad()
def _head(target: Target, length: int, head: Selector, settings: ElasticSettings) -> Row:
    """Time the scoring of all KV entries, in milliseconds."""
    cache = target.plain_cache(settings.batch, length, 1)
    cache.rewind([length] * settings.batch)
    tokens = random_ids(target.info.vocab_size, settings.batch, length, seed=length)
    tokens_BS, n_B = pad(tokens, target.device)
    step = TargetStep(None, random_states(target, head, settings.batch, length, seed=0))
    head.start(tokens_BS, n_B, step, SelectedCache(cache))
    root_B = tokens_BS[:, -1].clone()
    return {"head_ms": replay.replayed(lambda _: head.ahead(root_B), target.device, calls=1, repeats=20)}
