"""Timers of `longtrain bench`: wall time, CUDA events and peak memory.

The measured work is a function without arguments.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from longtrain.costs.hardware import GIB
from longtrain.decoding.captured import Stopwatch
from longtrain.errors import LongtrainError
from longtrain.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Timing:
    """Time and memory of one run.

    Args:
        wall_ms: wall time between two synchronised states of the device.
        device_ms: time between two CUDA events; None on a CPU.
        peak_bytes: peak of allocated memory during the run; None on a CPU.
        reserved_bytes: peak of the memory that torch has reserved so far; None on a CPU.
    """

    wall_ms: float
    device_ms: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None


def wait(device: torch.device) -> None:
    """Synchronise with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def watched(work: Callable[[], object], device: torch.device) -> Stopwatch:
    """Launch work without waiting for it; the returned stopwatch is read once the work has finished."""
    watch = Stopwatch(device)
    work()
    watch.stop()
    return watch


def spread_of(watches: Sequence[Stopwatch]) -> dict[str, float]:
    """Return the spread of the milliseconds of finished work."""
    return spread([1e3 * watch.seconds() for watch in watches])


def timed(work: Callable[[], object], device: torch.device) -> Timing:
    """Run work once and time it."""
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
    """Time work several times, after warmup runs."""
    for _ in range(warmup):
        work()
    release(device)
    return [timed(work, device) for _ in range(repeats)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile of measurements."""
    if len(values) == 1:
        return {"median": values[0], "p10": values[0], "p90": values[0]}
    tenths = quantiles(values, n=10, method="inclusive")
    return {"median": median(values), "p10": tenths[0], "p90": tenths[-1]}


def spread_columns(heading: str, key: str) -> dict[str, str]:
    """Return table columns for a `spread`: the median under its heading, and both percentiles."""
    return {heading: f"{key}.median", "p10": f"{key}.p10", "p90": f"{key}.p90"}


def summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return spreads of wall and device time over runs, and the highest memory peak."""
    on_device = [one.device_ms for one in timings if one.device_ms is not None]
    peak = max((one.peak_bytes for one in timings if one.peak_bytes is not None), default=None)
    return {
        "ms": spread([one.wall_ms for one in timings]),
        "device_ms": spread(on_device) if on_device else None,
        "peak_bytes": peak,
        "peak_gib": gib(peak),
    }


def versus(base: Sequence[Timing], other: Sequence[Timing]) -> dict[str, Any]:
    """Return the paired differences, `other` minus `base`, in milliseconds and as ratios."""
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
    """Return a function: should iteration `i` run? `least` of them always, up to `most` if time allows."""
    start = time.perf_counter()
    return lambda i: i < least or (i < most and time.perf_counter() - start < seconds)


@contextmanager
def may_fail(row: dict[str, Any], device: torch.device, *kinds: type[Exception]) -> Iterator[list[Exception]]:
    """Context manager that records an out-of-memory (or listed) error in `row["failed"]`, not raising it.

    It yields a list that contains the error afterwards, if there was one.

    Args:
        row: the measurement, whose values so far are kept.
        device: the device whose unused memory is freed when the block ends.
        kinds: further error classes to record.
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
        traceback.clear_frames(error.__traceback__)  # or tensors of its frames stay on the device
    release(device)


def filled(
    about: Mapping[str, Any],
    parts: Iterable[Mapping[str, Any]],
    device: torch.device,
    *kinds: type[Exception],
) -> dict[str, Any]:
    """Measure a row part by part, up to the first error.

    Args:
        about: the keys that identify the row.
        parts: yields the row's metrics; each is measured when the iterator is advanced.
        device: see `may_fail`.
        kinds: see `may_fail`.
    """
    row = dict(about)
    with may_fail(row, device, *kinds):
        for part in parts:
            row |= part
    return row


def release(device: torch.device) -> None:
    """Free unreferenced memory of the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int | None:
    """Return the bytes allocated on a CUDA device; None for a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def gib(size: int | None) -> float | None:
    """Convert bytes to GiB."""
    return None if size is None else size / GIB
