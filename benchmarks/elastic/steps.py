"""Steps of plain and sparse decoding over random KV entries, as CUDA graphs (not on a CPU).

The hidden share of a transfer: the time it adds to a step with all entries on the GPU is measured twice, with
the transfer before the step and with the same transfer beside it; the share is the time saved by the second,
relative to the first. It is omitted on a CPU, which has no asynchronous transfers, and if the first is within
noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cycles import CycleCounts, ready
from benchmarks.elastic.overlap import OverlapSelector
from benchmarks.elastic.settings import MODES, ElasticSettings
from longtrain.bench import clock
from longtrain.bench.suites import Context, Row, random_ids
from longtrain.cache.base import KVCache
from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.entry_sets import ReadBudget
from longtrain.cache.named import cache_maker
from longtrain.costs import roofline
from longtrain.costs.hardware import GIB
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.captured import Cycles
from longtrain.decoding.decode_step import DecodeStep
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.targets.model import Target

PLAIN = TreeShape(())
COLUMNS = {
    "tokens": "tokens",
    "rows": "rows",
    "system": "system",
    "layers side by side": "side_by_side",
    "step ms": "step_ms.median",
    "p99": "p99_ms",
    "of full": "of_full",
    "of rows on the GPU": "of_gpu",
    "of the roofline": "of_roofline",
    "MB moved a step": "moved_mb",
    "ms moved before": "transfer_ms",
    "ms left beside": "exposed_ms",
    "hidden": "hidden",
}


def measure(
    target: Target, length: int, budgets: Sequence[ReadBudget], settings: ElasticSettings, context: Context
) -> Iterator[Row]:
    """Yield rows of full-attention steps, and of sparse steps in every mode.

    Args:
        target: the model.
        length: tokens in the cache.
        budgets: read budgets of the sparse steps.
        settings: see `ElasticSettings`.
        context: the suite's context.
    """
    about: Row = {"tokens": length, "system": "full"}
    full = clock.filled(about, _full(target, length, settings), context.device)
    yield _beside(full, full, target, length, settings, context)
    for side_by_side in settings.side_by_side:
        for budget in budgets:
            for row in _modes(target, length, budget, settings, side_by_side):
                yield _beside(row, full, target, budget.rows, settings, context)


def _full(target: Target, length: int, settings: ElasticSettings) -> Iterator[Row]:
    """Measure plain decoding over all KV entries."""
    yield timed(Cycles(plain(target, length, settings.batch, settings), captured=True), settings)


def _beside(
    row: Row, full: Row, target: Target, rows: int, settings: ElasticSettings, context: Context
) -> Row:
    """Add a row's ratio to the full step and to the lower bound of a step that reads as many entries."""
    if "step_ms" not in row:
        return row
    ms = row["step_ms"]["median"]
    if "step_ms" in full:
        row["of_full"] = ms / full["step_ms"]["median"]
    if context.gpu is not None:
        bits = 8 * target.dtype.itemsize
        size, width = Sizes.of(target.info), Width(bits, bits)
        step = roofline.step(size, batch=settings.batch, context=rows, width=width)
        row["of_roofline"] = ms / roofline.metrics(step, context.gpu)["ms"]
    return row


def _modes(
    target: Target, length: int, budget: ReadBudget, settings: ElasticSettings, side_by_side: int
) -> Iterator[Row]:
    """Measure sparse decoding in every mode."""
    found: dict[str, Row] = {}
    for mode in settings.modes:
        about = {"tokens": length, "rows": budget.rows, "system": mode, "side_by_side": side_by_side}
        offloading = replace(MODES[mode], side_by_side=side_by_side)
        row = clock.filled(about, _mode(target, length, budget, offloading, settings), target.device)
        if "step_ms" in row:
            found[mode] = row
            sync = found.get(mode.replace("async", "sync")) if target.device.type == "cuda" else None
            row |= shares(row, found.get("gpu"), sync)
        yield row


def shares(row: Row, gpu: Row | None, sync: Row | None) -> Row:
    """Return a step's time relative to one with entries on the GPU, and the hidden share of the transfer.

    Args:
        row: the step's row.
        gpu: the row of a step with all entries on the GPU.
        sync: the row of a step that waits for the same transfer; None: do not compute the hidden share. It
            is omitted if the 10th percentile of its times is not above the 90th percentile of `gpu`.
    """
    if gpu is None:
        return {}
    ms, base_ms = row["step_ms"]["median"], gpu["step_ms"]["median"]
    found: Row = {"of_gpu": ms / base_ms}
    if sync is not None and sync is not row:
        added = sync["step_ms"]["median"] - base_ms
        found |= {"transfer_ms": added, "exposed_ms": ms - base_ms}
        above_noise = sync["step_ms"]["p10"] > gpu["step_ms"]["p90"]
        found["hidden"] = 1 - (ms - base_ms) / added if above_noise else None
    return found


def _mode(
    target: Target, length: int, budget: ReadBudget, offloading: Offloading, settings: ElasticSettings
) -> Iterator[Row]:
    decode_step, cache = sparse(target, length, budget, offloading, settings)
    before: list[int] = []
    cycles = Cycles(decode_step, captured=True)
    row = timed(cycles, settings, warm=lambda: before.append(cache.moved_bytes))
    row["moved_mb"] = (cache.moved_bytes - before[0]) / settings.steps / 1e6
    row["device_gib"] = (cache.bytes() - cache.host_bytes) / GIB
    yield row


def plain(target: Target, length: int, batch: int, settings: ElasticSettings) -> DecodeStep:
    """Return plain decoding cycles over a cache of random KV entries."""
    prompts = random_ids(target.info.vocab_size, batch, length, seed=length)
    return ready(target, Parts(), prompts, PLAIN, _counts(settings))


def sparse(
    target: Target,
    length: int,
    budget: ReadBudget,
    offloading: Offloading,
    settings: ElasticSettings,
    *,
    batch: int | None = None,
    grows: int = 0,
    selects: bool = True,
) -> tuple[DecodeStep, ElasticCache]:
    """Return decoding cycles over an elastic cache of random KV entries.

    Args:
        target: the model.
        length: tokens in the cache.
        budget: read budget of the steps.
        offloading: storage and transfer of entries.
        settings: see `ElasticSettings`.
        batch: sequences; None: the settings' batch.
        grows: tokens by which the sequence may grow, besides those of the steps.
        selects: True: steps read selected entries; False: all entries, transferred layer by layer.
    """
    info = target.info
    names = ("n_layers", "n_heads", "n_kv_heads", "head_dim")
    shape: dict[str, Any] = {name: getattr(info, name) for name in names}
    maker = cache_maker("elastic", vars(offloading), **shape, device=target.device, dtype=target.dtype)

    def reserved(*sizes: int) -> KVCache:
        cache = maker(*sizes)
        assert isinstance(cache, ElasticCache)
        cache.reserve(budget)
        return cache

    chooses = OverlapSelector(budget, target, settings.overlap) if selects else None
    parts = Parts(cache=reserved, selector=chooses, name="overlap")
    prompts = random_ids(info.vocab_size, batch or settings.batch, length, seed=length)
    decode_step = ready(target, parts, prompts, PLAIN, _counts(settings, grows))
    assert isinstance(decode_step.cache, ElasticCache)
    return decode_step, decode_step.cache


def room(settings: ElasticSettings, grows: int = 0) -> int:
    """Return the tokens that `sparse` allocates after the sequence."""
    return _counts(settings, grows).room(PLAIN)


def _counts(settings: ElasticSettings, grows: int = 0) -> CycleCounts:
    return CycleCounts(settings.steps + (grows + 1) // 2, settings.warmup, read=False)


@torch.no_grad()
def timed(cycles: Cycles, settings: ElasticSettings, *, warm: Callable[[], object] = lambda: None) -> Row:
    """Return spread and 99th percentile of a step's milliseconds; `warm` runs before the counted steps."""
    device = cycles.decode_step.target.device
    for _ in range(settings.warmup):
        cycles.run()
    warm()
    watches = [clock.watched(cycles.run, device) for _ in range(settings.steps)]
    clock.wait(device)
    ms = sorted(1e3 * watch.seconds() for watch in watches)
    return {"step_ms": clock.spread(ms), "p99_ms": ms[min(len(ms) - 1, int(0.99 * len(ms)))]}
