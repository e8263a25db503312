"""Clocks for work on a device: wall time, CUDA events and peak memory, alone or in pairs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from longtrain.bench.report import gib, spread

SCRATCH_BYTES, SCRATCH_WRITES = 2**29, 4
"""Written before a short piece of work: it empties the L2 cache, and while the GPU writes the host queues the
work, so that events do not time the host."""


@dataclass(frozen=True)
class Run:
    """One run of a piece of work.

    Args:
        wall_ms: from a device at rest to a device at rest, on the host's clock.
        device_ms: the same between two CUDA events; None on a CPU.
        peak_bytes: most memory allocated while it ran; None on a CPU.
    """

    wall_ms: float
    device_ms: float | None
    peak_bytes: int | None


def run(work: Callable[[], object], device: torch.device) -> Run:
    """Run a piece of work and clock it."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return Run(1e3 * (time.perf_counter() - start), None, None)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    before.record()
    work()
    after.record()
    torch.cuda.synchronize(device)
    wall_ms = 1e3 * (time.perf_counter() - start)
    return Run(wall_ms, before.elapsed_time(after), torch.cuda.max_memory_allocated(device))


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Spreads of both clocks over some runs, and the highest peak."""
    on_device = [one.device_ms for one in runs if one.device_ms is not None]
    peaks = [one.peak_bytes for one in runs if one.peak_bytes is not None]
    peak = max(peaks) if peaks else None
    return {
        "ms": spread([one.wall_ms for one in runs]),
        "device_ms": spread(on_device) if on_device else None,
        "peak_bytes": peak,
        "peak_gib": gib(peak),
    }


def versus(base: Sequence[Run], other: Sequence[Run]) -> dict[str, Any]:
    """What `other` takes beyond the run of `base` that it was paired with."""
    extra = [b.wall_ms - a.wall_ms for a, b in zip(base, other, strict=True)]
    share = [b.wall_ms / a.wall_ms for a, b in zip(base, other, strict=True)]
    found: dict[str, Any] = {"extra_ms": spread(extra), "paired_ratio": spread(share), "pairs": len(extra)}
    found["ratio"] = (
        spread([b.wall_ms for b in other])["median"] / spread([a.wall_ms for a in base])["median"]
    )
    found["overhead_percent"] = 100 * (spread(share)["median"] - 1)
    return found


def rounds(most: int, *, least: int, seconds: float) -> Callable[[int], bool]:
    """Whether round `i` is still to be run: `least` always, then up to `most` while the time lasts."""
    start = time.perf_counter()
    return lambda i: i < least or (i < most and time.perf_counter() - start < seconds)


def short(
    work: Callable[[int], object],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    writes: int = SCRATCH_WRITES,
) -> dict[str, float]:
    """Spread of the milliseconds of a short piece of work, the caches cold.

    Args:
        work: called with 0, 1, 2, ...; it takes another copy of its inputs each time.
        device: where it runs.
        warmup: calls not counted.
        repeats: calls counted.
        writes: of scratch memory before each call; as many as keep the GPU busy while the host queues it.
    """
    for i in range(warmup):
        work(i)
    if device.type != "cuda":
        return spread([run(lambda i=i: work(i), device).wall_ms for i in range(repeats)])  # type: ignore[misc]
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for i, (before, after) in enumerate(events):
        torch.cuda.synchronize(device)
        for _ in range(writes):
            scratch.zero_()
        before.record()
        work(i)
        after.record()
    torch.cuda.synchronize(device)
    return spread([before.elapsed_time(after) for before, after in events])


@lru_cache(maxsize=8)
def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written a second by a plain copy, for devices without an entry in the data sheets."""
    source = torch.ones(2**24 if device.type == "cpu" else 2**28, device=device)
    goal = torch.empty_like(source)
    best_ms = min(run(lambda: goal.copy_(source), device).wall_ms for _ in range(5))
    return 2 * source.nbytes / (1e-3 * best_ms)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
