"""One cycle of decoding, taken apart: draft, target attention, target linear, accepting; and idle time.

The cycle is `decoding.phases`, captured as the engine captures it. Each phase is also a CUDA graph of its own
here, so that the times between its events are the GPU's. On a CPU the phases run as they are.
Source: LongSpec Fig. 5 (one step split into draft, target attention, target linear, verification).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longtrain.bench.clock import spread
from longtrain.bench.cycle_start import CycleCounts
from longtrain.decoding.captured import Cycles, TokenTransfer, has_graphs, record
from longtrain.decoding.phases import Phases

Row = dict[str, Any]
Phase = Callable[[], None]


@torch.no_grad()
def whole(phases: Phases, counts: CycleCounts) -> Row:
    """Cycles one after another, as the engine runs them: wall time, the GPU's busy and idle time, tokens.

    Args:
        phases: begun; warmup and counted cycles are run.
        counts: how many cycles.
    """
    device = phases.target.device
    cycles = Cycles(phases, captured=True)
    transfer = TokenTransfer(cycles.late)
    marks: list[Any] = []

    def go(count: int) -> int:
        tokens = 0
        for i in range(count):
            marks.append(_mark(device))
            cycles.run()
            marks.append(_mark(device))
            transfer.send(phases.news_BX)
            for emitted in transfer.arrived(rest=i == count - 1):
                tokens += sum(map(len, emitted))
        return tokens

    go(counts.warmup)
    _wait(device)
    marks.clear()
    start = time.perf_counter()
    tokens = go(counts.cycles)
    _wait(device)
    wall_s = time.perf_counter() - start
    busy = [_between(a, b) for a, b in zip(marks[::2], marks[1::2], strict=True)]
    idle = [_between(a, b) for a, b in zip(marks[1::2], marks[2::2], strict=False)]
    return {
        "cycle_ms": 1e3 * wall_s / counts.cycles,
        "busy_ms": spread(busy),
        "idle_ms": spread(idle),
        "tokens_per_cycle": tokens / counts.cycles / len(phases.root_B),
        "tokens_per_s": tokens / wall_s,
    }


@torch.no_grad()
def split(phases: Phases, counts: CycleCounts) -> Row:
    """Milliseconds of each phase by itself, and of the target's attention and linear layers.

    Args:
        phases: begun.
        counts: how many cycles.
    """
    device = phases.target.device
    made: Row = {}  # what one phase leaves to the next, at one place in all cycles

    def propose() -> None:
        made["tree"] = phases.propose()

    def forward() -> None:
        made["step"] = phases.forward(made["tree"])

    def accept() -> None:
        made["verdict"] = phases.accept(made["tree"], made["step"])

    def commit() -> None:
        phases.commit(made["tree"], made["step"], made["verdict"])

    pool = torch.cuda.graph_pool_handle() if has_graphs(device) else None
    works = {"propose": propose, "forward": forward, "accept": accept, "commit": commit}
    found = _timed(works, counts, device, pool)
    found |= _timed({"attention": _attention(phases)}, counts, device, None)
    found["linear_ms"] = found["forward_ms"]["median"] - found["attention_ms"]["median"]
    return found


def _timed(works: Mapping[str, Phase], counts: CycleCounts, device: torch.device, pool: Any) -> Row:
    """Spread of the milliseconds of each piece of work, run one after another in every cycle."""
    for work in works.values():
        work()
    runs = {
        name: record(work, device, pool).replay if has_graphs(device) else work
        for name, work in works.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for cycle in range(counts.warmup + counts.cycles):
        marks = [_mark(device)]
        for run in runs.values():
            run()
            marks.append(_mark(device))
        _wait(device)
        if cycle >= counts.warmup:
            for name, a, b in zip(runs, marks[:-1], marks[1:], strict=True):
                times[name].append(_between(a, b))
    return {f"{name}_ms": spread(values) for name, values in times.items()}


def _attention(phases: Phases) -> Phase:
    """The cache's part of the target's forward: all layers' writes and attention."""
    target, cache = phases.target, phases.cache
    info, device = target.info, target.device
    B, T = len(phases.root_B), phases.shape.n_nodes
    coins = torch.Generator(device=device).manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn((B, heads, T, info.head_dim), generator=coins, device=device, dtype=target.dtype)

    q, k, v = random(info.n_heads), random(info.n_kv_heads), random(info.n_kv_heads)
    mask = phases.mask(phases.propose())

    def attend() -> None:
        for layer in range(info.n_layers):
            cache.write(layer, k, v)
            cache.attend(layer, q, mask=mask, scale=info.head_dim**-0.5)

    return attend


def _mark(device: torch.device) -> Any:
    """A point in time on the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    """Milliseconds between two points in time."""
    return 1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
