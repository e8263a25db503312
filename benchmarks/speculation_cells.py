"""The measurements of the suite `quantspec`: systems at several contexts, batches and tree shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.acceptance_model import AcceptanceModel, independent, recorded
from benchmarks.operators import Shape
from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.bench.suites import Auto, Context, Row, shape_keys
from longtrain.costs.cycle import Forward
from longtrain.costs.model import ITEM, Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.roles import TreeShape
from longtrain.kernels.tree_attention import MAX_NODES
from longtrain.settings import (
    AUTO,
    NOT_EMPTY,
    Count,
    CountOrZero,
    Counts,
    Lengths,
    Positive,
    Share,
    within,
)
from longtrain.systems import Entry

PLAIN_NAME, FULL = "plain", "full"
"""Names of the system without a draft, and of the cache in the model's dtype."""
RECORDED = "results/longspec_small/main.scores.json"
"""Recorded run of a trained draft, used by `suite.recorded=auto`."""
DRAFTED, MIDDLE = [1, 2, 3, 4, 6], 3
"""Drafted tokens per cycle: QuantSpec Fig. 9 and Table 6; the predicted optimum is 3."""

Drafted = Annotated[int, within(1, MAX_NODES - 1)]


@dataclass(frozen=True)
class CyclesSettings:
    """The keys of `suite=quantspec`.

    Args:
        shape: the model: a published name, or the keys of a `config.json`.
        lengths: tokens in the cache.
        systems: entries in the grammar of `longtrain.systems`; each may have its own `acceptance`.
        shape_systems: the entries of `systems=auto`.
        recorded_systems: entries that repeat the accepted lengths of `recorded`.
        drafted: default tokens drafted per cycle.
        acceptance: probability that a drafted token is accepted if all before it were.
        recorded: a run's `results.json` or `scores.json`; None: no recorded systems.
        batches: batch sizes at the first length.
        batch_drafted: tokens drafted in the comparison of batches and in timing by phase.
        split: time cycles of the first length by phase.
        fill: fill caches with random keys and values, or with a prompt that is read.
        cycles: counted cycles.
        warmup: cycles before them.
        compile_threads: kernels compiled in parallel before anything is timed; 0: compile when needed.
        memory_gib: GPU memory that may be used; None: all.
    """

    shape: Shape
    lengths: Lengths
    systems: tuple[Any, ...] | Literal["auto"]
    shape_systems: tuple[Any, ...]
    recorded_systems: tuple[Any, ...]
    drafted: Annotated[tuple[Drafted, ...], NOT_EMPTY, Auto(DRAFTED, [2])]
    acceptance: Share = 0.9
    recorded: str | None = None
    batches: Counts = (1,)
    batch_drafted: Annotated[Drafted | None, Auto(None, None)] = None
    split: bool = True
    fill: Annotated[Literal["random", "prompt"], Auto("random", "random")] = "random"
    cycles: Annotated[Count, Auto(64, 8)] = 64
    warmup: Annotated[int, within(2)] = 4
    compile_threads: CountOrZero = 8
    memory_gib: Positive | None = None


@dataclass(frozen=True)
class CycleCell:
    """One measurement.

    Args:
        system: `PLAIN_NAME`, or the name of a system.
        cache: kind of the cache: `FULL`, `INT8`, ...
        context: tokens in the cache.
        batch: sequences.
        split: also time cycles by phase.
        shape: shape of the drafted tree.
        children: distribution of the accepted lengths; None in plain decoding.
        forwards: the forwards of a cycle, for the prediction; empty: unknown.
        entry: the entry of draft and cache; None: plain decoding on the plain cache.
        drafts: True if the entry's draft is used, and its weights are on the device.
    """

    system: str
    cache: str
    context: int
    batch: int = 1
    split: bool = False
    shape: TreeShape = PLAIN
    children: AcceptanceModel | None = None
    forwards: tuple[Forward, ...] = ()
    entry: Entry | None = None
    drafts: bool = True

    @property
    def name(self) -> str:
        """Name of the system and its tree, for display."""
        widths = self.shape.widths
        if not widths:
            return f"{self.system}, {self.cache} cache"
        return f"{self.system} {len(widths) if set(widths) == {1} else '-'.join(map(str, widths))}"

    @property
    def parts_key(self) -> tuple[Entry | None, bool]:
        """Key of the cell's parts; successive cells with the same key share them."""
        return self.entry, self.drafts

    def facts(self) -> Row:
        """Keys that identify a row."""
        row: Row = {
            "system": self.system,
            "cache": self.cache,
            "name": self.name,
            "shape": list(self.shape.widths),
            "drafted": self.shape.depth,
            "prompt_tokens": self.context,
            "batch": self.batch,
        }
        if self.children is not None:
            row["accepted"] = self.children.source | {"tokens_per_cycle": self.children.tokens_per_cycle}
        return row


def cells_of(settings: CyclesSettings, context: Context) -> list[CycleCell]:
    """Return the cells: plain decoding, recorded systems, plain decoding from systems' caches, and systems.

    Systems without a cache of their own come first, so that no other cache occupies memory meanwhile.

    Raises:
        ArtifactError: there is no such artifact.
        ConfigError: an entry or the shape is wrong, or two entries have the same name.
        DataError: `suite.recorded` is not a file of a run's results.
    """
    size = Sizes.of_keys(shape_keys(settings.shape))
    caches: dict[str, list[CycleCell]] = {}
    drafting: list[CycleCell] = []
    for entry in context.entries(settings.shape_systems if settings.systems == AUTO else settings.systems):
        own = _drafted_cells(settings, entry, size, batches=not drafting)
        drafting += own
        if own[0].cache != FULL and own[0].cache not in caches:
            verification = (Forward(own[0].forwards[-1].width),)
            alone = CycleCell(PLAIN_NAME, own[0].cache, 0, forwards=verification, entry=entry, drafts=False)
            caches[own[0].cache] = list(_placed(settings, alone))
    plain = CycleCell(PLAIN_NAME, FULL, 0, forwards=(Forward(Width()),))
    undrafted = [cell for cells in caches.values() for cell in cells]
    return [*_placed(settings, plain), *_recorded_cells(settings, size, context), *undrafted, *drafting]


def _placed(settings: CyclesSettings, cell: CycleCell) -> Iterator[CycleCell]:
    """Yield a cell at every length, and at the first one also in batches; the first is timed by phase."""
    first = settings.lengths[0]
    batches = [(first, batch) for batch in sorted(settings.batches) if batch > 1]
    for length, batch in [*((length, 1) for length in settings.lengths), *batches]:
        split = settings.split and (length, batch) == (first, 1)
        yield replace(cell, context=length, batch=batch, split=split)


def _drafting_cell(entry: Entry, size: Sizes, shape: TreeShape, children: AcceptanceModel) -> CycleCell:
    """Return the cell of a system with one tree shape, without context and batch."""
    forwards = forwards_of(entry, size, shape)
    return CycleCell(
        entry.called(),
        cache_name(forwards),
        0,
        shape=shape,
        children=children,
        forwards=forwards,
        entry=entry,
    )


def _recorded_cells(settings: CyclesSettings, size: Sizes, context: Context) -> Iterator[CycleCell]:
    """Yield systems that repeat a run's accepted lengths: those of the run's name, or else all."""
    if settings.recorded is None:
        return
    own = asset_dir("recipes") / RECORDED
    file = own if settings.recorded == AUTO else Path(settings.recorded).expanduser()
    for entry in context.entries(settings.recorded_systems):
        drafts, name = recorded(file), entry.called()
        named = [draft for draft in drafts if f"{draft.name} ".startswith(f"{name} ")]
        for draft in named or drafts:
            children = draft.children(file, settings.lengths[0])
            cell = _drafting_cell(entry, size, TreeShape(draft.shape), children)
            for placed in _placed(settings, cell):
                yield replace(placed, children=draft.children(file, placed.context))


def _drafted_cells(settings: CyclesSettings, entry: Entry, size: Sizes, *, batches: bool) -> list[CycleCell]:
    """Return a system's cells: every shape at every length, and with `batches` the middle one in batches."""
    widths = {*(entry.shapes or ((1,) * count for count in settings.drafted))}
    if settings.batch_drafted is not None:
        widths.add((1,) * settings.batch_drafted)
    ordered = sorted(widths, key=lambda one: (len(one), one))
    wanted = (1,) * (settings.batch_drafted or MIDDLE)
    middle = wanted if wanted in widths else ordered[-1]
    rate = settings.acceptance if entry.acceptance is None else entry.acceptance
    found: list[CycleCell] = []
    for one in ordered:
        cell = _drafting_cell(entry, size, TreeShape(one), independent(rate, len(one)))
        main = one == middle
        found += [
            replace(placed, split=placed.split and main)
            for placed in _placed(settings, cell)
            if placed.batch == 1 or (main and batches)
        ]
    return sorted(found, key=lambda cell: (cell.batch, cell.context))


def forwards_of(entry: Entry, size: Sizes, shape: TreeShape) -> tuple[Forward, ...]:
    """Return the forwards of a system's cycle, verification last; empty if its method declares no costs."""
    cycle = methods.get(entry.method.name).cost.cycle if entry.method else None
    if entry.method is None or cycle is None:
        return ()
    return cycle(entry.config(), size, shape.widths, ITEM).forwards


def cache_name(forwards: Sequence[Forward]) -> str:
    """Return `full`, `INT8`, ...: the width in which the verification, the last forward, reads the cache."""
    bits = forwards[-1].width.kv if forwards else 16
    return FULL if bits == 16 else f"INT{bits}"
