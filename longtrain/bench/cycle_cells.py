"""What `bench suite=quantspec` measures of a shape: systems at contexts, batches and shapes of drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.assets import asset_dir
from longtrain.bench.acceptance_law import AcceptanceLaw, independent, recorded
from longtrain.bench.suites import Row
from longtrain.costs.cycle import Forward
from longtrain.costs.model import ITEM, Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
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
from longtrain.systems import Builder, Entry, parse

if TYPE_CHECKING:
    from longtrain.targets.model import Target

PLAIN_NAME, FULL = "plain", "full"
"""The system that drafts nothing, and the cache in the model's own numbers."""
RECORDED = "results/longspec_small/main.scores.json"
"""A trained draft's run among the recipes: what `suite.recorded=auto` repeats."""
DRAFTED, MIDDLE = [1, 2, 3, 4, 6], 3
"""Drafted tokens a cycle: QuantSpec Fig. 9 and Table 6; the step model is best at 3."""

Drafted = Annotated[int, within(1, MAX_NODES - 1)]


@dataclass(frozen=True)
class CyclesSettings:
    """The keys of `suite=quantspec` with `suite.shape`.

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

    shape: str | dict[str, Any]
    lengths: Lengths
    systems: tuple[Any, ...] | Literal["auto"]
    shape_systems: tuple[Any, ...]
    recorded_systems: tuple[Any, ...]
    drafted: Annotated[tuple[Drafted, ...], NOT_EMPTY]
    acceptance: Share = 0.9
    recorded: str | None = None
    batches: Counts = (1,)
    batch_drafted: Drafted | None = None
    split: bool = True
    fill: Literal["random", "prompt"] = "random"
    cycles: Count = 64
    warmup: Annotated[int, within(2)] = 4
    compile_threads: CountOrZero = 8
    memory_gib: Positive | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """Contexts and batches: every length alone, the first one in batches too."""
        batches = [(self.lengths[0], batch) for batch in sorted(self.batches) if batch > 1]
        return [(length, 1) for length in self.lengths] + batches

    def cells(self, system: str, forwards: Sequence[Forward], **more: Any) -> list[CycleCell]:
        """The cells of a system at every place; further arguments are those of `CycleCell`."""
        places, cache, known = self.places, cache_name(forwards), tuple(forwards)
        return [
            CycleCell(system, cache, n, batch, self.split and (n, batch) == places[0], forwards=known, **more)
            for n, batch in places
        ]


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
    """

    system: str
    cache: str
    context: int
    batch: int = 1
    split: bool = False
    shape: TreeShape = PLAIN
    law: AcceptanceLaw | None = None
    forwards: tuple[Forward, ...] = ()

    @property
    def name(self) -> str:
        """What decodes and what it drafts, for people."""
        widths = self.shape.widths
        if not widths:
            return f"{self.system}, {self.cache} cache"
        return f"{self.system} {len(widths) if set(widths) == {1} else '-'.join(map(str, widths))}"

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


@dataclass(frozen=True)
class CellGroup:
    """Cells that decode with the same parts.

    Args:
        attach: makes draft and cache for a target.
        cells: measured in this order.
    """

    attach: Callable[[Target], Parts]
    cells: tuple[CycleCell, ...]


def groups_of(
    settings: CyclesSettings, size: Sizes, seed: int, load: Callable[[str], Artifact]
) -> list[CellGroup]:
    """Plain decoding, recorded systems, plain decoding from the caches that systems bring, and the systems.

    Groups without a cache of their own come first, so that none is held while others are measured.

    Args:
        settings: see `CyclesSettings`.
        size: the model.
        seed: of random weights.
        load: gives an artifact by its name or folder.

    Raises:
        ArtifactError: there is no such artifact.
        ConfigError: an entry is wrong, or two have one name.
        DataError: `suite.recorded` is not a run's scores.
    """
    bring = functools.partial(attach, seed=seed, load=load)
    plain = CellGroup(lambda target: Parts(), tuple(settings.cells(PLAIN_NAME, [Forward(Width())])))
    caches: dict[str, CellGroup] = {}
    drafting: list[CellGroup] = []
    for entry in _parsed(settings.shape_systems if settings.systems == AUTO else settings.systems, load):
        cells = tuple(_drafted_cells(settings, entry, size, batches=not drafting))
        drafting.append(CellGroup(functools.partial(bring, entry=entry), cells))
        if cells[0].cache != FULL and cells[0].cache not in caches:
            verification = [Forward(cells[0].forwards[-1].width)]
            undrafted = functools.partial(bring, entry=entry, draft=False)
            caches[cells[0].cache] = CellGroup(undrafted, tuple(settings.cells(PLAIN_NAME, verification)))
    return [plain, *_recorded_groups(settings, size, bring, load), *caches.values(), *drafting]


def _recorded_groups(
    settings: CyclesSettings, size: Sizes, bring: Callable[..., Parts], load: Callable[[str], Artifact]
) -> Iterator[CellGroup]:
    """Systems that repeat what a run's drafts were accepted, at the first length."""
    if settings.recorded is None:
        return
    own = asset_dir("recipes") / RECORDED
    file = own if settings.recorded == AUTO else Path(settings.recorded).expanduser()
    for entry in _parsed(settings.recorded_systems, load):
        for draft in recorded(file):
            shape, law = TreeShape(draft.shape), draft.law(file, settings.lengths[0])
            cells = settings.cells(entry.called(), forwards_of(entry, size, shape), shape=shape, law=law)
            first = tuple(cell for cell in cells if cell.context == settings.lengths[0])
            yield CellGroup(functools.partial(bring, entry=entry), first)


def _drafted_cells(settings: CyclesSettings, entry: Entry, size: Sizes, *, batches: bool) -> list[CycleCell]:
    """The cells of a system: every shape at every length, and the middle one in batches where wanted."""
    widths = {*(entry.shapes or ((1,) * count for count in settings.drafted))}
    if settings.batch_drafted is not None:
        widths.add((1,) * settings.batch_drafted)
    shapes = [TreeShape(one) for one in sorted(widths, key=lambda one: (len(one), one))]
    wanted = (1,) * (settings.batch_drafted or MIDDLE)
    middle = next((shape for shape in shapes if shape.widths == wanted), shapes[-1])
    rate = settings.acceptance if entry.acceptance is None else entry.acceptance
    found: list[CycleCell] = []
    for shape in shapes:
        law = independent(rate, shape.depth)
        cells = settings.cells(entry.called(), forwards_of(entry, size, shape), shape=shape, law=law)
        main = shape == middle
        found += [
            replace(cell, split=cell.split and main)
            for cell in cells
            if cell.batch == 1 or (main and batches)
        ]
    return sorted(found, key=lambda cell: (cell.batch, cell.context))


def _parsed(values: Sequence[Any], load: Callable[[str], Artifact]) -> list[Entry]:
    """Entries, each with another name; what they name is there."""
    found = [parse(value) for value in values]
    for entry in found:
        if entry.method is not None:
            entry.config()
        for name in entry.artifacts:
            load(name)
    names = [entry.called() for entry in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"suite.systems has two systems named {twice[0]}; give one of them a `label`")
    return found


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


def attach(
    target: Target, *, entry: Entry, seed: int, load: Callable[[str], Artifact], draft: bool = True
) -> Parts:
    """What an entry brings; a method that would have to be trained gets random weights.

    Args:
        target: the model.
        entry: a system.
        seed: of the random weights.
        load: gives an artifact by its name or folder.
        draft: False leaves out the draft, whose weights are then given back.
    """
    parts = Builder(target, (), (TreeShape((1,)),), load, random_seed=seed).of(entry)[0].parts
    return parts if draft else replace(parts, draft=None)
