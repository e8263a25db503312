"""The one clock of `longtrain bench`: wall time, CUDA events, replayed CUDA graphs and peak memory.

A piece of work is a function without arguments (`timed`, `repeated`), or one that is called with 0, 1, 2, ...
and takes another copy of its inputs each time (`cold`, `replayed`), so that none is found in a cache.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import median, quantiles
from typing import Any

import torch

from longtrain.costs.hardware import GIB

SCRATCH_BYTES, SCRATCH_WRITES = 2**29, 4
"""Written before a short piece of work: it empties the L2 cache, and while the GPU writes the host queues the
work, so that events do not time the host."""
ROTATED_BYTES = 2**30
"""Inputs are copied until they fill so many bytes, and used in turn: no call finds its own in a cache."""
MOST_COPIES = 16


@dataclass(frozen=True)
class Timing:
    """One run of a piece of work.

    Args:
        wall_ms: from a device at rest to a device at rest, on the host's clock.
        device_ms: the same between two CUDA events; None on a CPU.
        peak_bytes: most memory allocated while it ran; None on a CPU.
        reserved_bytes: most memory that torch took from the device until then; None on a CPU.
    """

    wall_ms: float
    device_ms: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None


def timed(work: Callable[[], object], device: torch.device) -> Timing:
    """Run a piece of work and clock it."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return Timing(1e3 * (time.perf_counter() - start))
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    before.record()
    work()
    after.record()
    torch.cuda.synchronize(device)
    wall_ms = 1e3 * (time.perf_counter() - start)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Timing(wall_ms, before.elapsed_time(after), peak, reserved)


def repeated(work: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> list[Timing]:
    """Clock a piece of work several times, after runs that are not counted."""
    for _ in range(warmup):
        work()
    release(device)
    return [timed(work, device) for _ in range(repeats)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of some measurements."""
    if len(values) == 1:
        return {"median": values[0], "p10": values[0], "p90": values[0]}
    tenths = quantiles(values, n=10, method="inclusive")
    return {"median": median(values), "p10": tenths[0], "p90": tenths[-1]}


def spread_columns(heading: str, key: str) -> dict[str, str]:
    """Columns of a table for a `spread`: the median under its heading, and both percentiles."""
    return {heading: f"{key}.median", "p10": f"{key}.p10", "p90": f"{key}.p90"}


def summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """Spreads of both clocks over some runs, and the highest peak."""
    on_device = [one.device_ms for one in timings if one.device_ms is not None]
    peak = max((one.peak_bytes for one in timings if one.peak_bytes is not None), default=None)
    return {
        "ms": spread([one.wall_ms for one in timings]),
        "device_ms": spread(on_device) if on_device else None,
        "peak_bytes": peak,
        "peak_gib": gib(peak),
    }


def versus(base: Sequence[Timing], other: Sequence[Timing]) -> dict[str, Any]:
    """What `other` takes beyond the run of `base` that it was paired with."""
    pairs = list(zip(base, other, strict=True))
    extra = [b.wall_ms - a.wall_ms for a, b in pairs]
    share = spread([b.wall_ms / a.wall_ms for a, b in pairs])
    medians = [spread([one.wall_ms for one in side])["median"] for side in (base, other)]
    return {
        "extra_ms": spread(extra),
        "paired_ratio": share,
        "pairs": len(extra),
        "ratio": medians[1] / medians[0],
        "overhead_percent": 100 * (share["median"] - 1),
    }


def rounds(most: int, *, least: int, seconds: float) -> Callable[[int], bool]:
    """Whether round `i` is still to be run: `least` always, then up to `most` while the time lasts."""
    start = time.perf_counter()
    return lambda i: i < least or (i < most and time.perf_counter() - start < seconds)


def cold(
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
        return spread([timed(lambda i=i: work(i), device).wall_ms for i in range(repeats)])  # type: ignore[misc]
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.int8, device=device)
    events = _events(repeats)
    for i, (before, after) in enumerate(events):
        torch.cuda.synchronize(device)
        for _ in range(writes):
            scratch.zero_()
        before.record()
        work(i)
        after.record()
    torch.cuda.synchronize(device)
    return spread([before.elapsed_time(after) for before, after in events])


def replayed(
    work: Callable[[int], object], device: torch.device, *, calls: int, repeats: int
) -> dict[str, float]:
    """Spread of the milliseconds of a call, without the host in them.

    Args:
        work: called with 0 .. calls - 1; it takes another copy of its inputs each time.
        device: on CUDA the calls are captured once in a CUDA graph and replayed, elsewhere they are timed one
            by one.
        calls: of one replay.
        repeats: replays counted, three before them are not.
    """
    if device.type != "cuda":
        return cold(work, device, warmup=1, repeats=repeats)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for i in range(2):
            work(i % calls)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i)
    for _ in range(3):
        graph.replay()
    events = _events(repeats)
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize(device)
    return spread([before.elapsed_time(after) / calls for before, after in events])


def copies_of(size_bytes: int, device: torch.device) -> int:
    """Copies of inputs of so many bytes: 2 to `MOST_COPIES` on a GPU, 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return min(MOST_COPIES, max(2, -(-ROTATED_BYTES // size_bytes)))


@lru_cache(maxsize=8)
def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written a second by a plain copy, for devices without an entry in the data sheets."""
    source = torch.ones(2**24 if device.type == "cpu" else 2**28, device=device)
    goal = torch.empty_like(source)
    best_ms = min(timed(lambda: goal.copy_(source), device).wall_ms for _ in range(5))
    return 2 * source.nbytes / (1e-3 * best_ms)


@lru_cache(maxsize=8)
def read_bytes_per_s(device: torch.device) -> float:
    """Most bytes a second that a reduction of a large tensor reads: the ceiling of what only reads."""
    x = torch.rand(2**22 if device.type == "cpu" else 2**29, device=device)
    best_ms = min(
        replayed(lambda _, read=read: read(x), device, calls=2, repeats=10)["median"]  # type: ignore[misc]
        for read in (torch.sum, torch.amax)
    )
    return x.nbytes / (1e-3 * best_ms)


@contextmanager
def memory_may_run_out(row: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Make running out of memory inside the block a result: the row says it under `failed`.

    Args:
        row: the row that is being measured; it keeps what it had.
        device: the device whose memory is given back when the block ends.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        row["failed"] = f"out of memory: {str(error).partition('.')[0]}"
        traceback.clear_frames(error.__traceback__)  # or what they hold stays on the device
    release(device)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int | None:
    """Bytes of the tensors that are on a CUDA device now; None for a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def gib(size: int | None) -> float | None:
    """Bytes as GiB."""
    return None if size is None else size / GIB


def _events(count: int) -> list[tuple[Any, Any]]:
    """Pairs of CUDA events, one for the beginning and one for the end."""
    return [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
