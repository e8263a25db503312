"""Decode-step latency as a sequence grows and layers' KV caches are offloaded to the host one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import drawing
from benchmarks.elastic.settings import ElasticSettings
from benchmarks.elastic.steps import sparse, timed
from longtrain import plots
from longtrain.bench.suites import Row
from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.entry_sets import ReadBudget
from longtrain.costs.elastic import ElasticMemory
from longtrain.costs.hardware import GIB
from longtrain.decoding.captured import Cycles
from longtrain.targets.model import Target

COLUMNS = {
    "tokens": "tokens",
    "layers on the host": "on_host",
    "step ms": "step_ms.median",
    "p99": "p99_ms",
    "of the step before": "of_before",
}


@torch.no_grad()
def measure(target: Target, budget: ReadBudget, settings: ElasticSettings) -> Iterator[Row]:
    """Yield a row for each length, with the lengths since the previous row at which layers were offloaded."""
    growth = settings.growth
    offloading = Offloading(memory_gib=settings.growth_gib, side_by_side=settings.side_by_side[0])
    decode_step, cache = sparse(target, growth[0], budget, offloading, settings, grows=growth[-1] - growth[0])
    thresholds = _memory(target, budget, offloading, settings).thresholds(settings.growth_gib * GIB)
    cycles, before = Cycles(decode_step, captured=True), None
    last = 0
    for length in growth:
        row: Row = {"tokens": length, "kind": "growth", **at_length(cycles, cache, length, settings)}
        row["thresholds"] = [one for one in thresholds if one is not None and last < one < length]
        ms, last = row["step_ms"]["median"], length
        yield row | {"of_before": None if before is None else ms / before}
        before = ms


def at_length(cycles: Cycles, cache: ElasticCache, length: int, settings: ElasticSettings) -> Row:
    """Time steps as if the sequence had grown to a length; skipped KV entries hold arbitrary values."""
    cache.make_room(length + settings.warmup + settings.steps + 1)
    cache.len_B.fill_(length)
    return {"on_host": len(cache.offloaded), **timed(cycles, settings)}


def _memory(
    target: Target, budget: ReadBudget, offloading: Offloading, settings: ElasticSettings
) -> ElasticMemory:
    """Return the predicted device memory of the cache."""
    info = target.info
    return ElasticMemory(
        info.n_layers,
        info.n_kv_heads,
        info.head_dim,
        settings.batch,
        target.dtype.itemsize,
        slots=budget.rows + budget.every,
        page_entries=offloading.page_entries,
    )


def picture(rows: Sequence[Row]) -> bytes:
    """Plot the milliseconds of a step by length, with the lengths at which layers are offloaded."""
    figure, (axes,) = plots.panels(1, size=(6.5, 4.0))
    metrics = [drawing.of_spread(row["step_ms"]) for row in rows]
    plots.points(axes, [row["tokens"] for row in rows], metrics, "step, 10th to 90th percentile")
    named: dict[str, Any] = {"label": "one more layer leaves the device"}
    for row in rows:
        for tokens in row["thresholds"]:
            axes.axvline(tokens, color="grey", linewidth=0.8, linestyle=":", **named)
            named = {}
    axes.set_ylim(bottom=0)
    plots.label(axes, "tokens in the cache", "ms of a step")
    return plots.png(figure)
