"""Steps of a text that grows under a cap on memory, as one layer's rows after another leave the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.elastic.settings import ElasticSettings
from benchmarks.elastic.steps import sparse, timed
from longtrain import plots
from longtrain.bench.suites import Row
from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.row_sets import ReadBudget
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
    """Rows at growing lengths, with the lengths since the row before at which layers had to leave."""
    growth = settings.growth
    offloading = Offloading(memory_gib=settings.growth_gib, side_by_side=settings.side_by_side[0])
    phases, cache = sparse(target, growth[0], budget, offloading, settings, grows=growth[-1] - growth[0])
    thresholds = _memory(target, budget, offloading, settings).thresholds(settings.growth_gib * GIB)
    cycles, before = Cycles(phases, captured=True), None
    last = 0
    for length in growth:
        row: Row = {"tokens": length, "kind": "growth", **at_length(cycles, cache, length, settings)}
        row["thresholds"] = [one for one in thresholds if one is not None and last < one < length]
        ms, last = row["step_ms"]["median"], length
        yield row | {"of_before": None if before is None else ms / before}
        before = ms


def at_length(cycles: Cycles, cache: ElasticCache, length: int, settings: ElasticSettings) -> Row:
    """Steps of a text as if it had grown to a length; rows that nobody wrote mean nothing."""
    cache.make_room(length + settings.warmup + settings.steps + 1)
    cache.len_B.fill_(length)
    return {"on_host": len(cache.offloaded), **timed(cycles, settings)}


def _memory(
    target: Target, budget: ReadBudget, offloading: Offloading, settings: ElasticSettings
) -> ElasticMemory:
    """The arithmetic of what the cache takes on the device."""
    info = target.info
    return ElasticMemory(
        info.n_layers,
        info.n_kv_heads,
        info.head_dim,
        settings.batch,
        target.dtype.itemsize,
        slots=budget.rows + budget.every,
        page_rows=offloading.page_rows,
    )


def picture(rows: Sequence[Row]) -> bytes:
    """Milliseconds of a step by length, with the lengths at which layers leave the device."""
    figure, (axes,) = plots.panels(1, size=(6.5, 4.0))
    figures = [plots.of_spread(row["step_ms"]) for row in rows]
    plots.points(axes, [row["tokens"] for row in rows], figures, "step, 10th to 90th percentile")
    named: dict[str, Any] = {"label": "one more layer leaves the device"}
    for row in rows:
        for tokens in row["thresholds"]:
            axes.axvline(tokens, color="grey", linewidth=0.8, linestyle=":", **named)
            named = {}
    axes.set_ylim(bottom=0)
    plots.label(axes, "tokens in the cache", "ms of a step")
    return plots.png(figure)
