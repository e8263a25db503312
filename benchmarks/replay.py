"""Replays work from CUDA graphs on rotating inputs, and measures the bandwidth that a device reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from longtrain.bench import clock
from longtrain.decoding.captured import record

ROTATED_BYTES = 2**30
"""Total bytes of the copies of an input, which are used in turn so that they are not in a cache."""
MOST_COPIES = 16
SCRATCH_BYTES, SCRATCH_WRITES = 2**29, 4
"""Scratch memory written before short work: this empties the L2 cache, and keeps the GPU busy while the host
queues the work, so that events do not measure the host."""


def replayed(
    work: Callable[[int], object], device: torch.device, *, calls: int, repeats: int
) -> dict[str, float]:
    """Return the spread of a call's milliseconds, without host time.

    Args:
        work: called with 0 .. calls - 1, to select another copy of its inputs each time.
        device: on CUDA the calls are captured in a CUDA graph and replayed; elsewhere they are timed one by
            one.
        calls: calls of one replay.
        repeats: counted replays, after three uncounted ones.
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
    stopwatches = [clock.watched(graph.replay, device) for _ in range(repeats)]
    clock.wait(device)
    return {name: ms / calls for name, ms in clock.spread_of(stopwatches).items()}


def cold(
    work: Callable[[int], object],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
) -> dict[str, float]:
    """Return the spread of the milliseconds of short work with cold caches.

    Args:
        work: called with 0, 1, 2, ..., to select another copy of its inputs each time.
        device: the device it runs on.
        warmup: calls not counted.
        repeats: calls counted.
    """
    for i in range(warmup):
        work(i)
    cuda = device.type == "cuda"
    scratch = torch.empty(SCRATCH_BYTES if cuda else 0, dtype=torch.int8, device=device)
    watches = []
    for i in range(repeats):
        clock.wait(device)
        for _ in range(SCRATCH_WRITES if cuda else 0):
            scratch.zero_()
        watches.append(clock.watched(partial(work, i), device))
    clock.wait(device)
    return clock.spread_of(watches)


def copies_of(size_bytes: int, device: torch.device) -> int:
    """Return the number of copies of an input: 2 to `MOST_COPIES` on a GPU, 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return min(MOST_COPIES, max(2, -(-ROTATED_BYTES // size_bytes)))


@lru_cache(maxsize=8)
def copy_bytes_per_s(device: torch.device) -> float:
    """Measure the bytes per second read and written by a plain copy, for devices without a data sheet."""
    source = torch.ones(2**24 if device.type == "cpu" else 2**28, device=device)
    goal = torch.empty_like(source)
    best_ms = min(clock.timed(lambda: goal.copy_(source), device).wall_ms for _ in range(5))
    return 2 * source.nbytes / (1e-3 * best_ms)


@lru_cache(maxsize=8)
def read_bytes_per_s(device: torch.device) -> float:
    """Measure the most bytes per second that a reduction of a large tensor reads: the bound of reading."""
    x = torch.rand(2**22 if device.type == "cpu" else 2**29, device=device)
    best_ms = min(
        replayed(lambda _, read=read: read(x), device, calls=2, repeats=10)["median"]  # type: ignore[misc]
        for read in (torch.sum, torch.amax)
    )
    return x.nbytes / (1e-3 * best_ms)
