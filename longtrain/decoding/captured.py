"""Decoding cycles as CUDA graphs: their static buffers, and the cache of graphs.

The host launches one graph for each cycle and reads its tokens one cycle late, so the GPU never waits for it.
The end of a sequence (stop string or stop id) is noticed one cycle late too; the tokens of that cycle are
dropped. Without CUDA graphs the same code runs, and the host launches each operator.

Shapes: B batch, S cache positions.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.arena import Arena, ArenaCache, arena_for, arena_over, movable, rounded_slots
from longtrain.cache.base import KVCache
from longtrain.cache.dense import DenseCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.decode_step import CycleState, DecodeStep
from longtrain.decoding.roles import TreeShape
from longtrain.kernels.tree_attention import MAX_NODES

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Pool: TypeAlias = Any
"""Memory of graphs (`torch.cuda.CUDAGraph.pool`)."""


class Cycles:
    """Cycles of one shape: run directly, or from the second one on as a CUDA graph.

    The first cycle compiles kernels and allocates state. On a CPU there are no graphs.

    Args:
        decode_step: a cycle.
        captured: True if cache and draft update their state in place, so that one graph serves all cycles;
            the host then reads tokens one cycle late.
        pool: returns the memory pool that graphs share which never run at the same time.
    """

    def __init__(
        self, decode_step: DecodeStep, *, captured: bool, pool: Callable[[], Pool | None] = lambda: None
    ) -> None:
        self.decode_step, self._captured, self._pool = decode_step, captured, pool
        self._work: Callable[[], None] = decode_step
        self._graph: Any = None
        self._tensors: list[Tensor] = []
        self._addresses: list[Hashable] = []
        self._ran = False
        self._counted = False
        """True if the host has counted the next replay's tokens: recording the graph does so."""
        self.capture_s = 0.0
        """Wall time that making the graph took, in seconds."""

    @property
    def late(self) -> int:
        """Number of cycles that tokens are read late."""
        return int(self._captured)

    @property
    def sound(self) -> bool:
        """True if all tensors of the graph are at the recorded addresses, or if there is no graph."""
        return self._graph is None or self.holds(self.decode_step)

    def prepare(self) -> bool:
        """Record the graph before the second run. True if the coming run takes as long as later ones."""
        device = self.decode_step.target.device
        if self._captured and self._ran and self._graph is None and has_graphs(device):
            started_s = time.perf_counter()
            self.decode_step.cache.foresee(0)  # offloads layers if needed; a recording cannot
            self._graph = record(self._work, device, self._pool())
            self._counted = True  # recording runs the Python code of a cycle, host counters included
            self._tensors = _persistent_tensors(self.decode_step)
            self._addresses = _addresses_of(self._tensors)
            self.capture_s += time.perf_counter() - started_s
        return self._ran

    def run(self) -> None:
        """Run the next cycle, by a replay of the graph if there is one."""
        self.prepare()
        if self._graph is None:
            self.decode_step()
        else:
            if not self._counted:  # a replay runs no Python code: tell the cache how far lengths may grow
                self.decode_step.cache.foresee(self.decode_step.shape.depth + 1)
            self._counted = False
            self._graph.replay()
        self._ran = True

    @property
    def pool(self) -> Pool | None:
        """The memory of the graph; None before it is made."""
        return None if self._graph is None else self._graph.pool()

    def holds(self, decode_step: DecodeStep) -> bool:
        """True if the graph can be replayed for this step: its tensors are at the recorded addresses."""
        return self._graph is not None and self._addresses == _addresses_of(_persistent_tensors(decode_step))


class CutCycles(Cycles):
    """Cycles of a draft that cuts its trees: a graph drafts, and one for each number of nodes does the rest.

    The host reads that number between the two. The first run with a number compiles kernels, the second one
    is recorded.

    Args:
        decode_step: a cycle.
        pool: as for `Cycles`.
    """

    def __init__(self, decode_step: DecodeStep, *, pool: Callable[[], Pool | None] = lambda: None) -> None:
        super().__init__(decode_step, captured=True, pool=pool)
        self._work = self._draft
        self._rests: dict[int, Any] = {}
        """By the number of nodes: their graph, or None after the first run."""

    def _draft(self) -> None:
        """Draft; the trees stay where a graph has put them."""
        self._drafted = self.decode_step.draft_trees()

    def run(self) -> None:
        """Run the next cycle."""
        self.prepare()
        step = self.decode_step
        if self._graph is None:
            self._draft()
        else:
            self._graph.replay()
        tree, left = self._drafted
        assert left is not None
        nodes = int(left)
        rest = self._rests.get(nodes)
        if rest is not None:
            step.cache.foresee(step.shape.depth + 1)
            rest.replay()
        else:
            started_s, work = time.perf_counter(), partial(step.finish, tree.first(nodes))
            if self._graph is None or nodes not in self._rests:
                self._rests[nodes] = None
                work()
            else:
                step.cache.foresee(0)
                self._rests[nodes] = rest = record(work, step.target.device, self.pool)
                rest.replay()
            if has_graphs(step.target.device):
                self.capture_s += time.perf_counter() - started_s
        self._ran = True


def has_graphs(device: torch.device) -> bool:
    """True if work on this device can be recorded as a CUDA graph."""
    return device.type == "cuda"


def record(work: Callable[[], None], device: torch.device, pool: Pool | None) -> Any:
    """Record `work` as a CUDA graph without running it; `replay` of the result runs it.

    Args:
        work: does not synchronise with the host, and uses tensors whose addresses do not change.
        device: the device that the work runs on.
        pool: memory shared with graphs that never run at the same time; None: its own.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # destroying an old graph during capture would invalidate the new one
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool):
            work()
    finally:
        if collects:
            gc.enable()
    return graph


class Stopwatch:
    """Measures the device time of the work launched until `stop`, without waiting for it.

    Args:
        device: the device whose current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks = [self._mark()]

    def stop(self) -> None:
        """Mark the end: the work has been launched."""
        self._marks.append(self._mark())

    def seconds(self) -> float:
        """Elapsed seconds; called when the work is known to be finished."""
        start, stop = self._marks
        return 1e-3 * float(start.elapsed_time(stop)) if self._cuda else stop - start

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ShapeCycles:
    """Cycles of several shapes over the same sequences, cache and draft, made as they are needed.

    Args:
        make: returns the cycles of a shape, with the draft or without it; those of an earlier call if their
            graph can still be replayed.
        device: the device that they run on.
    """

    def __init__(self, make: Callable[[TreeShape, bool], Cycles], device: torch.device) -> None:
        self._make, self._device = make, device
        self._made: dict[tuple[TreeShape, bool], Cycles] = {}
        self.capture_s = 0.0
        """Wall seconds for recording graphs, and for the cycles before them that compile kernels."""

    def run(self, shape: TreeShape, *, timed: bool, drafts: bool = True) -> tuple[Tensor, Stopwatch | None]:
        """Run the next cycle.

        Args:
            shape: shape of its trees.
            timed: True to measure its time.
            drafts: False to leave the draft out of it.

        Returns:
            Its tokens (`DecodeStep.news_BX`), and its time unless it includes compilation.
        """
        key = shape, drafts
        cycles = self._made.get(key)
        if cycles is None:
            cycles = self._made[key] = self._make(shape, drafts)
        known_s = cycles.capture_s
        ripe = cycles.prepare()
        prepared_s = cycles.capture_s
        compiles = not ripe and has_graphs(self._device)
        stopwatch = Stopwatch(self._device) if timed and not compiles else None
        started_s = time.perf_counter()
        cycles.run()
        if stopwatch is not None:
            stopwatch.stop()
        if compiles and cycles.late:
            self.capture_s += time.perf_counter() - started_s + prepared_s - known_s
        else:
            self.capture_s += cycles.capture_s - known_s
        if cycles.capture_s > prepared_s:
            stopwatch = None
        if not ripe:  # a draft may have allocated larger buffers
            self._drop_unsound()
        return cycles.decode_step.news_BX, stopwatch

    def between(self, work: Callable[[], None]) -> Stopwatch:
        """Run `work` (a restart of the draft) between two cycles, and measure it."""
        stopwatch = Stopwatch(self._device)
        work()
        stopwatch.stop()
        self._drop_unsound()
        return stopwatch

    def forget_drafts(self) -> None:
        """Make cycles with a draft anew: another one takes its place."""
        self._made = {key: one for key, one in self._made.items() if not key[1]}

    def _drop_unsound(self) -> None:
        """Drop graphs that were recorded over a draft's old buffers."""
        self._made = {key: one for key, one in self._made.items() if one.sound}


class CaptureBuffers:
    """Static buffers that an engine keeps from call to call: one arena, and the cycles captured over it.

    Args:
        target: the frozen model.
        selects: True if steps read selected entries only.
    """

    def __init__(self, target: Target, *, selects: bool = False) -> None:
        self.target, self._selects = target, selects
        self.arena: Arena | None = None
        self._selected: SelectedCache | None = None
        self._cycles: dict[Hashable, Cycles] = {}
        self._texts: CycleState | None = None

    def new_cache(self, batch: int, max_tokens: int, max_nodes: int) -> DenseCache | LayeredCache:
        """The arena's buffers as an empty cache for the prompts; same arguments as `Target.new_cache`."""
        store = self._reserve(batch, max_tokens + max_nodes)
        store.rewind([0] * batch)
        return store

    def take_in(self, cache: KVCache, *, room: int) -> KVCache:
        """Move `cache` to static buffers that cycles can be captured over.

        Args:
            cache: committed prompts, for which `can_capture` is True.
            room: cache positions needed after them.
        """
        if cache.tensors() is not None:
            return cache
        arena = self.arena
        if arena is None or not (cache is arena.store or arena.fits(cache, room)):
            self._free()
            arena = self.arena = arena_for(cache, room)
        arena.take(cache, room=room)
        if not self._selects:
            return arena
        assert isinstance(arena, ArenaCache)
        if self._selected is None or self._selected.store is not arena:
            self._selected = SelectedCache(arena)
        return self._selected

    def texts(self, len_B: Tensor) -> CycleState:
        """State shared by cycles of all shapes; at the same addresses in calls of the same batch size."""
        known = self._texts
        if known is None or known.root_B.shape != len_B.shape or known.root_B.device != len_B.device:
            known = self._texts = CycleState(len_B)
        return known

    def cycles(self, decode_step: DecodeStep, key: Hashable) -> Cycles:
        """The cycles of an earlier call if their graph can still be replayed, else new ones.

        Args:
            decode_step: a cycle over the present cache and draft.
            key: all other constants of a graph.
        """
        found = self._cycles.get(key)
        if found is None or not found.holds(decode_step):
            if decode_step.cuts:
                found = CutCycles(decode_step, pool=self._pool)
            else:
                found = Cycles(decode_step, captured=True, pool=self._pool)
            self._cycles[key] = found
        return found

    def _pool(self) -> Pool | None:
        """The memory pool of an existing graph: a pool that no graph uses any more cannot be reused."""
        return next((one.pool for one in self._cycles.values() if one.pool is not None), None)

    def _reserve(self, batch: int, slots: int) -> DenseCache | LayeredCache:
        """The store of an arena for `batch` sequences of `slots` positions; the present one if it fits."""
        arena, target = self.arena, self.target
        if arena is not None and arena.store is not None:
            buffer, *_ = arena.tensors() or ()
            like = buffer.shape[1] == batch and (buffer.device, buffer.dtype) == (target.device, target.dtype)
            if like and arena.slots >= slots:
                return arena.store
        self._free()
        make = target.plain_cache if self._selects else target.new_cache
        store = make(batch, rounded_slots(slots) - MAX_NODES, MAX_NODES)
        self.arena = arena_over(store)
        return store

    def _free(self) -> None:
        """Drop the arena and the graphs over it, before the next one is allocated."""
        if self.arena is not None:
            self.arena.free()
        self.arena = self._selected = None
        self._cycles.clear()


def can_capture(cache: KVCache) -> bool:
    """True if cycles over this cache, or over its entries in an arena, can be captured."""
    return cache.tensors() is not None or movable(cache)


def _addresses_of(tensors: Sequence[Tensor]) -> list[Hashable]:
    """Addresses, shapes and strides of tensors, as a graph has recorded them."""
    return [(one.data_ptr(), tuple(one.shape), one.stride()) for one in tensors]


def _persistent_tensors(decode_step: DecodeStep) -> list[Tensor]:
    """All tensors that live across cycles; the target's weights are represented by two of them."""
    target, texts = decode_step.target, decode_step.texts
    roles = [role.tensors() or () for role in (decode_step.draft, decode_step.selector) if role is not None]
    weights = [target.head_weight, target.model.model.norm.weight]
    if target.fused is not None:
        weights += target.fused.tensors()
    state = (texts.root_B, texts.left_B, texts.most)
    return [*(decode_step.cache.tensors() or ()), *(one for own in roles for one in own), *state, *weights]
