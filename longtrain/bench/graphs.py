"""Milliseconds of short device work without the host in them: a CUDA graph of calls on rotating inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from longtrain.bench import timing
from longtrain.bench.report import spread

ROTATED_BYTES = 2**30
"""Inputs are copied until they fill so many bytes, and used in turn: no call finds its own in a cache."""
MOST_COPIES = 16


def copies_of(size_bytes: int, device: torch.device) -> int:
    """Copies of inputs of so many bytes: 2 to `MOST_COPIES` on a GPU, 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return min(MOST_COPIES, max(2, -(-ROTATED_BYTES // size_bytes)))


def replayed(
    work: Callable[[int], object], device: torch.device, *, calls: int, repeats: int
) -> dict[str, float]:
    """Spread of the milliseconds of a call.

    Args:
        work: called with 0 .. calls - 1; it takes another copy of its inputs each time.
        device: on CUDA the calls are captured once and replayed, elsewhere they are timed one by one.
        calls: of one replay.
        repeats: replays counted, three before them are not.
    """
    if device.type != "cuda":
        return timing.short(work, device, warmup=1, repeats=repeats)
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
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize(device)
    return spread([before.elapsed_time(after) / calls for before, after in events])


@lru_cache(maxsize=8)
def read_bytes_per_s(device: torch.device) -> float:
    """Most bytes a second that a reduction of a large tensor reads: the ceiling of what only reads."""
    x = torch.rand(2**22 if device.type == "cpu" else 2**29, device=device)
    best_ms = min(
        replayed(lambda _, read=read: read(x), device, calls=2, repeats=10)["median"]  # type: ignore[misc]
        for read in (torch.sum, torch.amax)
    )
    return x.nbytes / (1e-3 * best_ms)
