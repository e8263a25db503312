"""What the suite `quantspec` measures of a shape: systems at contexts, batches and shapes of drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.acceptance_law import AcceptanceLaw, independent, recorded
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
"""The system that drafts nothing, and the cache in the model's own numbers."""
RECORDED = "results/longspec_small/main.scores.json"
"""A trained draft's run among the recipes: what `suite.recorded=auto` repeats."""
DRAFTED, MIDDLE = [1, 2, 3, 4, 6], 3
"""Drafted tokens a cycle: QuantSpec Fig. 9 and Table 6; the step model is best at 3."""

Drafted = Annotated[int, within(1, MAX_NODES - 1)]


@dataclass(frozen=True)
class CyclesSettings:
    """The keys of `suite=quantspec`.

    Args:
        shape: the model: a published name, or the keys of a `config.json`.
        lengths: tokens cached before.
        systems: entries of the one grammar (`longtrain.systems`); each may have its own `acceptance`.
        shape_systems: what `systems=auto` stands for.
        recorded_systems: entries that repeat the accepted lengths of `recorded`.
        drafted: tokens drafted a cycle by an entry that says nothing else.
        acceptance: chance that a drafted token is accepted where all before it were.
        recorded: a run's `results.json` or `scores.json`; None: no recorded systems.
        batches: sequences decoded together, at the first length.
        batch_drafted: tokens drafted where batches are compared and cycles taken apart.
        split: take cycles of the first length apart.
        fill: whether caches are filled with random rows or with a prompt that is read.
        cycles: cycles counted.
        warmup: cycles before them.
        compile_threads: kernels compiled at once before anything is timed; 0: when they are needed.
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
        system: what decodes: `PLAIN_NAME`, or the name of a system.
        cache: what it decodes from: `FULL`, or `INT8` and the like.
        context: tokens cached before.
        batch: sequences.
        split: take cycles apart too.
        shape: what is drafted.
        law: the numbers of drafts that are accepted; None in plain decoding.
        forwards: the forwards of a cycle, for the step model; empty: there is none.
        entry: what brings draft and cache; None: nothing does.
        drafts: whether the entry's draft is asked, and has its weights on the device.
    """

    system: str
    cache: str
    context: int
    batch: int = 1
    split: bool = False
    shape: TreeShape = PLAIN
    law: AcceptanceLaw | None = None
    forwards: tuple[Forward, ...] = ()
    entry: Entry | None = None
    drafts: bool = True

    @property
    def name(self) -> str:
        """What decodes and what it drafts, for people."""
        widths = self.shape.widths
        if not widths:
            return f"{self.system}, {self.cache} cache"
        return f"{self.system} {len(widths) if set(widths) == {1} else '-'.join(map(str, widths))}"

    @property
    def parts_key(self) -> tuple[Entry | None, bool]:
        """What its parts follow from: cells with the same key one after the other share them."""
        return self.entry, self.drafts

    def facts(self) -> Row:
        """What a row is about."""
        row: Row = {
            "system": self.system,
            "cache": self.cache,
            "name": self.name,
            "shape": list(self.shape.widths),
            "drafted": self.shape.depth,
            "prompt_tokens": self.context,
            "batch": self.batch,
        }
        if self.law is not None:
            row["accepted"] = self.law.source | {"tokens_per_cycle": self.law.tokens_per_cycle}
        return row


def cells_of(settings: CyclesSettings, context: Context) -> list[CycleCell]:
    """Plain decoding, recorded systems, plain decoding from the caches that systems bring, and the systems.

    Systems without a cache of their own come first, so that none is held while others are measured.

    Raises:
        ArtifactError: there is no such artifact.
        ConfigError: an entry or the shape is wrong, or two entries have one name.
        DataError: `suite.recorded` is not a run's scores.
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
    """A cell at every length alone, and at the first one in batches too; the first is taken apart."""
    first = settings.lengths[0]
    batches = [(first, batch) for batch in sorted(settings.batches) if batch > 1]
    for length, batch in [*((length, 1) for length in settings.lengths), *batches]:
        split = settings.split and (length, batch) == (first, 1)
        yield replace(cell, context=length, batch=batch, split=split)


def _drafting_cell(entry: Entry, size: Sizes, shape: TreeShape, law: AcceptanceLaw) -> CycleCell:
    """A system with one shape of its drafts, at no place yet."""
    forwards = forwards_of(entry, size, shape)
    return CycleCell(
        entry.called(), cache_name(forwards), 0, shape=shape, law=law, forwards=forwards, entry=entry
    )


def _recorded_cells(settings: CyclesSettings, size: Sizes, context: Context) -> Iterator[CycleCell]:
    """Systems that repeat what a run's drafts were accepted: those with its name, or else all."""
    if settings.recorded is None:
        return
    own = asset_dir("recipes") / RECORDED
    file = own if settings.recorded == AUTO else Path(settings.recorded).expanduser()
    for entry in context.entries(settings.recorded_systems):
        drafts, name = recorded(file), entry.called()
        named = [draft for draft in drafts if f"{draft.name} ".startswith(f"{name} ")]
        for draft in named or drafts:
            law = draft.law(file, settings.lengths[0])
            cell = _drafting_cell(entry, size, TreeShape(draft.shape), law)
            for placed in _placed(settings, cell):
                yield replace(placed, law=draft.law(file, placed.context))


def _drafted_cells(settings: CyclesSettings, entry: Entry, size: Sizes, *, batches: bool) -> list[CycleCell]:
    """The cells of a system: every shape at every length, and the middle one in batches where wanted."""
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
    """The forwards of a cycle of a system, as its method says, verification last; empty where it does not."""
    cycle = methods.get(entry.method.name).cost.cycle if entry.method else None
    if entry.method is None or cycle is None:
        return ()
    return cycle(entry.config(), size, shape.widths, ITEM).forwards


def cache_name(forwards: Sequence[Forward]) -> str:
    """`full`, or `INT8` and the like: the cache as a cycle's last forward, the verification, reads it."""
    bits = forwards[-1].width.kv if forwards else 16
    return FULL if bits == 16 else f"INT{bits}"
