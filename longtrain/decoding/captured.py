"""Cycles as CUDA graphs: where they take place, how they are kept, and how their tokens reach the host.

The host then launches one graph a cycle and reads its tokens one cycle late, so it never stands in the GPU's
way. A text that a stop string or stop id ends is noticed one cycle late as well; what that cycle emitted is
dropped. Without CUDA graphs the same code runs, each operator launched by the host.

Shapes: B batch, X numbers of a cycle.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.arena import ArenaCache, movable, rounded_slots
from longtrain.cache.base import KVCache
from longtrain.cache.dense import DenseCache
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.output import Emitted
from longtrain.decoding.phases import CycleState, Phases
from longtrain.decoding.roles import TreeShape

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Pool: TypeAlias = Any
"""Memory of graphs (`torch.cuda.CUDAGraph.pool`)."""


class Cycles:
    """The cycles of one kind of call: run as they are, or from the second on as a CUDA graph.

    The first one compiles kernels and makes what is kept from cycle to cycle. On a CPU there are no graphs.

    Args:
        phases: a cycle.
        captured: whether cache and draft update their state in place, so that a graph of a cycle is every
            cycle; the host then reads its tokens one cycle late.
        pool: asked, when the graph is made, for the memory of graphs that never run at the same time.
    """

    def __init__(
        self, phases: Phases, *, captured: bool, pool: Callable[[], Pool | None] = lambda: None
    ) -> None:
        self.phases, self._captured, self._pool = phases, captured, pool
        self._graph: Any = None
        self._held: list[Tensor] = []
        self._where: list[Hashable] = []
        self._ran = False
        self._counted = False
        """Whether the host has counted what the next replay commits: it does as it records the graph."""
        self.capture_s = 0.0
        """Wall time that making the graph took, in seconds."""

    @property
    def late(self) -> int:
        """Cycles that the host reads behind."""
        return int(self._captured)

    @property
    def sound(self) -> bool:
        """Whether all that the graph works on lies where it lay; True where there is none."""
        return self._graph is None or self.holds(self.phases)

    def prepare(self) -> bool:
        """Make the graph if its time has come; whether the coming run will take as long as those after it."""
        device = self.phases.target.device
        if self._captured and self._ran and self._graph is None and has_graphs(device):
            started_s = time.perf_counter()
            self.phases.cache.foresee(0)
            self._graph = record(self.phases, device, self._pool())
            self._counted = True
            self._held = _held(self.phases)
            self._where = _places(self._held)
            self.capture_s = time.perf_counter() - started_s
        return self._ran

    def run(self) -> None:
        """The next cycle: propose, forward, accept, commit."""
        self.prepare()
        if self._graph is None:
            self.phases()
        else:
            if not self._counted:
                self.phases.cache.foresee(self.phases.shape.depth + 1)
            self._counted = False
            self._graph.replay()
        self._ran = True

    @property
    def pool(self) -> Pool | None:
        """The memory of the graph; None before it is made."""
        return None if self._graph is None else self._graph.pool()

    def holds(self, phases: Phases) -> bool:
        """Whether the graph is one of these phases: whether all that they work on lies where it lay."""
        return self._graph is not None and self._where == _places(_held(phases))


def has_graphs(device: torch.device) -> bool:
    """Whether work on this device can be recorded."""
    return device.type == "cuda"


def record(work: Callable[[], None], device: torch.device, pool: Pool | None) -> Any:
    """A CUDA graph of `work`, which is not run now; `replay` of the result runs it.

    Args:
        work: asks the host nothing, and works on tensors that stay where they are.
        device: the device that the work runs on.
        pool: memory shared with graphs that never run at the same time; None: its own.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # an old graph that is collected meanwhile would spoil the new one
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool):
            work()
    finally:
        if collects:
            gc.enable()
    return graph


class Stopwatch:
    """Time that a device spends on what is launched until `stop`; the host does not wait for it.

    Args:
        device: the device whose current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks = [self._mark()]

    def stop(self) -> None:
        """The work has been launched."""
        self._marks.append(self._mark())

    def seconds(self) -> float:
        """How long it took; asked when the work is known to be over."""
        start, stop = self._marks
        return 1e-3 * float(start.elapsed_time(stop)) if self._cuda else stop - start

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ShapeCycles:
    """Cycles of several shapes over the same texts, cache and draft, made as they are needed.

    Args:
        make: gives the cycles of a shape, with the draft or without it; those of an earlier call if their
            graph still holds.
        device: the device that they run on.
    """

    def __init__(self, make: Callable[[TreeShape, bool], Cycles], device: torch.device) -> None:
        self._make, self._device = make, device
        self._made: dict[tuple[TreeShape, bool], Cycles] = {}
        self.capture_s = 0.0
        """Wall time that making graphs took, and the cycles before them that compile kernels, in seconds."""

    def run(self, shape: TreeShape, *, timed: bool, drafts: bool = True) -> tuple[Tensor, Stopwatch | None]:
        """The next cycle.

        Args:
            shape: what is drafted in it.
            timed: whether its time is wanted.
            drafts: whether the draft hears of it.

        Returns:
            Its news (`Phases.news_BX`), and its time if it is that of every such cycle.
        """
        key = shape, drafts
        cycles = self._made.get(key)
        if cycles is None:
            cycles = self._made[key] = self._make(shape, drafts)
        known_s = cycles.capture_s
        ripe = cycles.prepare()
        self.capture_s += cycles.capture_s - known_s
        watch = Stopwatch(self._device) if timed and ripe else None
        started_s = time.perf_counter()
        cycles.run()
        if watch is not None:
            watch.stop()
        if not ripe and cycles.late and has_graphs(self._device):
            self.capture_s += time.perf_counter() - started_s
        if not ripe:  # a draft may have made room
            self._drop_unsound()
        return cycles.phases.news_BX, watch

    def between(self, work: Callable[[], None]) -> Stopwatch:
        """Work between two cycles, and the time since the one before ended; a draft may begin anew in it."""
        watch = Stopwatch(self._device)
        work()
        watch.stop()
        self._drop_unsound()
        return watch

    def _drop_unsound(self) -> None:
        """Graphs over a draft's old buffers are of no use any more."""
        self._made = {key: one for key, one in self._made.items() if one.sound}


class CaptureBuffers:
    """What an engine keeps from call to call: one arena, and the cycles captured over it.

    Args:
        target: the frozen model.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.arena: ArenaCache | None = None
        self._selected: SelectedCache | None = None
        self._cycles: dict[Hashable, Cycles] = {}
        self._texts: CycleState | None = None

    def new_cache(self, batch: int, max_tokens: int, max_nodes: int) -> DenseCache:
        """The arena's buffers as an empty cache to read prompts into; called as `Target.new_cache` is."""
        store = self._reserve(batch, max_tokens + max_nodes).store
        store.rewind([0] * batch)
        return store

    def take_in(self, cache: KVCache, *, room: int, selects: bool = False) -> KVCache:
        """A cache that cycles can be captured over, with the rows of `cache` in it.

        Args:
            cache: committed prompts; `can_capture` was asked.
            room: slots needed after them.
            selects: steps will read chosen rows.
        """
        if cache.tensors() is not None:
            return cache
        dense = movable(cache)
        assert dense is not None
        arena = self.arena
        if arena is None or dense is not arena.store:
            arena = self._reserve(len(cache.len_B), dense.used + room)
        arena.take(cache, room=room)
        if not selects:
            return arena
        if self._selected is None or self._selected.store is not arena:
            self._selected = SelectedCache(arena)
        return self._selected

    def texts(self, len_B: Tensor) -> CycleState:
        """What cycles of all shapes share; at the same place from call to call, for as many sequences."""
        known = self._texts
        if known is None or known.root_B.shape != len_B.shape or known.root_B.device != len_B.device:
            known = self._texts = CycleState(len_B)
        return known

    def cycles(self, phases: Phases, key: Hashable) -> Cycles:
        """The cycles of an earlier call of this kind if their graph still holds, else new ones.

        Args:
            phases: over the present cache and draft.
            key: whatever else is a constant in a graph of them.
        """
        found = self._cycles.get(key)
        if found is None or not found.holds(phases):
            found = self._cycles[key] = Cycles(phases, captured=True, pool=self._pool)
        return found

    def _pool(self) -> Pool | None:
        """The memory of a graph that lives: a pool that no graph holds any more cannot be taken up again."""
        return next((one.pool for one in self._cycles.values() if one.pool is not None), None)

    def _reserve(self, batch: int, slots: int) -> ArenaCache:
        """An arena for so many sequences, with at least so many slots of each."""
        arena, target = self.arena, self.target
        if arena is not None:
            buffer = arena.store.k_LBGSD
            like = buffer.shape[1] == batch and (buffer.device, buffer.dtype) == (target.device, target.dtype)
            if like and arena.slots >= slots:
                return arena
            arena.free()  # before the memory of the next is taken
        self.arena = self._selected = None
        self._cycles.clear()
        self.arena = ArenaCache(target.new_cache(batch, rounded_slots(slots), 0))
        return self.arena


class TokenTransfer:
    """What cycles emitted, on its way to the host.

    Args:
        late: cycles that it is read behind.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        self._sent: deque[Callable[[], list[list[int]]]] = deque()

    def send(self, news_BX: Tensor) -> None:
        """Post the tokens of the cycle just launched (`Phases.news_BX`)."""
        if not self._late or not news_BX.is_cuda:
            rows = news_BX.tolist()
            self._sent.append(lambda: rows)
            return
        copy = torch.empty(news_BX.shape, dtype=news_BX.dtype, pin_memory=True)
        copy.copy_(news_BX, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(news_BX.device))

        def read() -> list[list[int]]:
            arrived.synchronize()
            return copy.tolist()

        self._sent.append(read)

    def arrived(self, *, rest: bool) -> Iterator[list[Emitted]]:
        """What each row emitted, cycle by cycle: of all but the last `late` cycles, or of the rest."""
        while len(self._sent) > (0 if rest else self._late):
            yield [Emitted(row[2 : 2 + row[0]], row[1]) for row in self._sent.popleft()()]


def can_capture(cache: KVCache) -> bool:
    """Whether cycles over this cache, or over its rows in an arena, can be captured."""
    return cache.tensors() is not None or movable(cache) is not None


def _places(tensors: Sequence[Tensor]) -> list[Hashable]:
    """Where tensors lie, and how: what a graph has of them."""
    return [(one.data_ptr(), tuple(one.shape), one.stride()) for one in tensors]


def _held(phases: Phases) -> list[Tensor]:
    """What the operators of a cycle work on from cycle to cycle, the target's weights by two of them."""
    target, texts = phases.target, phases.texts
    roles = [role.tensors() or () for role in (phases.draft, phases.selector) if role is not None]
    weights = [target.head_weight, target.final_norm_weight]
    if target.fused is not None:
        weights += target.fused.tensors()
    state = (texts.root_B, texts.left_B, texts.most)
    return [*(phases.cache.tensors() or ()), *(one for held in roles for one in held), *state, *weights]
