"""One cycle of decoding, taken apart: draft, target attention, target linear, accepting; and idle time.

The cycle is `decoding.phases`, captured as the engine captures it. Each phase is also a CUDA graph of its own
here, so that the times between its events are the GPU's. On a CPU the phases run as they are.
Source: LongSpec Fig. 5 (one step split into draft, target attention, target linear, verification).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.bench.report import spread
from longtrain.decoding.captured import CaptureBuffers, Cycles, TokenTransfer, can_capture, has_graphs, record
from longtrain.decoding.phases import Phases
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts, TreeShape, onlooker
from longtrain.decoding.sampling import HashCoins, MinNewTokens, Sampling
from longtrain.errors import ConflictError

if TYPE_CHECKING:
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Settings:
    """What to take apart.

    Args:
        shape: what is drafted.
        sampling: processors.
        cycles: counted.
        warmup: cycles before them.
    """

    shape: TreeShape
    sampling: Sampling = Sampling()
    cycles: int = 32
    warmup: int = 4

    @property
    def room(self) -> int:
        """Tokens that the cycles of both `whole` and `split` may commit."""
        return 2 * (self.warmup + self.cycles + 2) * (self.shape.depth + 1)


@torch.no_grad()
def measure(
    target: Target, parts: Parts | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """Milliseconds of a cycle, of its phases, and of the GPU's idle time between cycles.

    Args:
        target: the model.
        parts: what brings draft, cache and evictor; None: plain decoding.
        prompts: token ids.
        settings: see `Settings`.

    Raises:
        ConflictError: such cycles cannot be captured.
    """
    shape, parts = settings.shape, parts or Parts()
    draft = parts.draft if shape.widths else None
    room = settings.room
    stage = CaptureBuffers(target)
    read = prefill(
        target,
        parts.cache or (target.new_cache if parts.evictor else stage.new_cache),
        prompts,
        max_new_tokens=room,
        nodes=shape.n_nodes,
        hidden=draft.want.hidden if draft else (),
        evictor=parts.evictor,
        onlooker=onlooker(draft),
    )
    if not can_capture(read.cache) or (draft is not None and draft.tensors() is None):
        raise ConflictError(f"the cycles of parts '{parts.name}' cannot be captured; pass suite.cycles=0")
    cache = stage.take_in(read.cache, room=room + shape.n_nodes)
    if draft is not None:
        draft.start(read.tokens_BS, read.n_B, read.step, cache)
    min_new = MinNewTokens((), 0, target.device)
    phases = Phases(target, cache, draft, shape, settings.sampling, min_new)
    ids_B = torch.arange(len(prompts), device=target.device)
    assert read.step.logits_BTV is not None
    phases.begin(read.step.logits_BTV[:, -1].argmax(-1), HashCoins(0, ids_B), room)
    return {
        "prompt_tokens": len(prompts[0]),
        "batch": len(prompts),
        "shape": list(shape.widths),
        **whole(phases, settings),
        **split(phases, settings),
    }


@torch.no_grad()
def whole(phases: Phases, settings: Settings) -> dict[str, Any]:
    """Cycles one after another, as the engine runs them: wall time, the GPU's busy and idle time, tokens.

    Args:
        phases: begun; warmup and counted cycles are run.
        settings: how many.
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

    go(settings.warmup)
    _wait(device)
    marks.clear()
    start = time.perf_counter()
    tokens = go(settings.cycles)
    _wait(device)
    wall_s = time.perf_counter() - start
    busy = [_between(a, b) for a, b in zip(marks[::2], marks[1::2], strict=True)]
    idle = [_between(a, b) for a, b in zip(marks[1::2], marks[2::2], strict=False)]
    return {
        "cycle_ms": 1e3 * wall_s / settings.cycles,
        "busy_ms": spread(busy),
        "idle_ms": spread(idle),
        "tokens_per_cycle": tokens / settings.cycles / len(phases.root_B),
        "tokens_per_s": tokens / wall_s,
    }


@torch.no_grad()
def split(phases: Phases, settings: Settings) -> dict[str, Any]:
    """Milliseconds of each phase by itself, and of the target's attention and linear layers.

    Args:
        phases: begun.
        settings: how many cycles.
    """
    found: dict[str, Any] = _split(phases, settings)
    found["attention_ms"] = _attention(phases, settings)
    found["linear_ms"] = found["forward_ms"]["median"] - found["attention_ms"]["median"]
    return found


def _split(phases: Phases, settings: Settings) -> dict[str, Any]:
    """Each phase by itself."""
    device = phases.target.device
    made: dict[str, Any] = {}  # what one phase leaves to the next, at one place in all cycles

    def propose() -> None:
        made["tree"] = phases.propose()

    def forward() -> None:
        made["step"] = phases.forward(made["tree"])

    def accept() -> None:
        made["verdict"] = phases.accept(made["tree"], made["step"])

    def commit() -> None:
        phases.commit(made["tree"], made["step"], made["verdict"])

    pool = torch.cuda.graph_pool_handle() if has_graphs(device) else None
    works = (propose, forward, accept, commit)
    for work in works:
        work()
    runs = {work.__name__: _recorded(work, device, pool) for work in works}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for cycle in range(settings.warmup + settings.cycles):
        marks = [_mark(device)]
        for run in runs.values():
            run()
            marks.append(_mark(device))
        _wait(device)
        if cycle >= settings.warmup:
            for name, a, b in zip(runs, marks[:-1], marks[1:], strict=True):
                times[name].append(_between(a, b))
    return {f"{name}_ms": spread(values) for name, values in times.items()}


def _attention(phases: Phases, settings: Settings) -> dict[str, float]:
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

    attend()
    run = _recorded(attend, device, None)
    times = []
    for cycle in range(settings.warmup + settings.cycles):
        before = _mark(device)
        run()
        after = _mark(device)
        _wait(device)
        if cycle >= settings.warmup:
            times.append(_between(before, after))
    return spread(times)


def _recorded(work: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """A graph of the work, which has run before; the work itself on a CPU."""
    return record(work, device, pool).replay if has_graphs(device) else work


def _mark(device: torch.device) -> Any:
    """A point in time on the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    """Milliseconds."""
    return 1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
