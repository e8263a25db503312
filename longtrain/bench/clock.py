"""The one clock of `longtrain bench`: wall time, CUDA events, replayed CUDA graphs and peak memory.

A piece of work is a function without arguments (`timed`, `repeated`), or one that is called with 0, 1, 2, ...
and takes another copy of its inputs each time (`cold`, `replayed`), so that none is found in a cache.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median, quantiles
from typing import Any

import torch

from longtrain.costs.hardware import GIB
from longtrain.decoding.captured import Stopwatch, record
from longtrain.errors import LongtrainError
from longtrain.log import get_logger

log = get_logger(__name__)

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


def wait(device: torch.device) -> None:
    """Return when the device is at rest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def watched(work: Callable[[], object], device: torch.device) -> Stopwatch:
    """Launch a piece of work; the host does not wait for it, and asks the watch once it is over."""
    watch = Stopwatch(device)
    work()
    watch.stop()
    return watch


def spread_of(watches: Sequence[Stopwatch]) -> dict[str, float]:
    """Spread of the milliseconds of work that is over."""
    return spread([1e3 * watch.seconds() for watch in watches])


def timed(work: Callable[[], object], device: torch.device) -> Timing:
    """Run a piece of work and clock it."""
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    watch = watched(work, device)
    wait(device)
    wall_ms = 1e3 * (time.perf_counter() - start)
    if device.type != "cuda":
        return Timing(wall_ms)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Timing(wall_ms, 1e3 * watch.seconds(), peak, reserved)


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
    cuda = device.type == "cuda"
    scratch = torch.empty(SCRATCH_BYTES if cuda else 0, dtype=torch.int8, device=device)
    watches = []
    for i in range(repeats):
        wait(device)
        for _ in range(writes if cuda else 0):
            scratch.zero_()
        watches.append(watched(partial(work, i), device))
    wait(device)
    return spread_of(watches)


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

    def run(count: int) -> None:
        for i in range(count):
            work(i)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run(min(2, calls))
    torch.cuda.current_stream(device).wait_stream(side)
    graph = record(partial(run, calls), device, None)
    for _ in range(3):
        graph.replay()
    watches = [watched(graph.replay, device) for _ in range(repeats)]
    wait(device)
    return {name: ms / calls for name, ms in spread_of(watches).items()}


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
def may_fail(row: dict[str, Any], device: torch.device, *kinds: type[Exception]) -> Iterator[list[Exception]]:
    """Make a fault inside the block a result: the row says it under `failed`, and keeps what it had.

    The block is given a list, which holds the fault afterwards, if there was one.

    Args:
        row: the row that is being measured.
        device: the device whose memory is given back when the block ends.
        kinds: the errors that are results too, beside running out of memory.
    """
    results: tuple[type[Exception], ...] = (torch.OutOfMemoryError, *kinds)
    faults: list[Exception] = []
    try:
        yield faults
    except results as error:
        line = (str(error).splitlines() or [""])[0][:200]
        if isinstance(error, torch.OutOfMemoryError):
            row["failed"] = f"out of memory: {line.partition('.')[0]}"
        elif isinstance(error, LongtrainError):
            row["failed"] = line
        else:
            row["failed"] = f"{type(error).__name__}: {line}"
            log.warning("could not be measured: %s", row["failed"])
            log.debug("where it failed", exc_info=error)
        faults.append(error)
        traceback.clear_frames(error.__traceback__)  # or what they hold stays on the device
    release(device)


def filled(
    about: Mapping[str, Any],
    parts: Iterable[Mapping[str, Any]],
    device: torch.device,
    *kinds: type[Exception],
) -> dict[str, Any]:
    """A row that is measured part by part, as far as that is possible.

    Args:
        about: what the row is about.
        parts: its figures; what an iterator has not given yet is measured when it is asked for.
        device: see `may_fail`.
        kinds: see `may_fail`.
    """
    row = dict(about)
    with may_fail(row, device, *kinds):
        for part in parts:
            row |= part
    return row


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
