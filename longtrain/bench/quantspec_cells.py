"""What `bench suite=quantspec` measures of a shape: ways of decoding, each at a context and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.bench.quantspec_accept import Law
from longtrain.costs.cycle import Forward
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from longtrain.targets.model import Target

FILLS = ("random", "prompt")
FULL, INT8 = "full", "INT8"
"""Caches: in the model's own numbers, or the hierarchical one as the target reads it."""


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Args:
        system: what decodes: `plain`, `longspec`, `quantspec`, ...
        cache: what it decodes from: `FULL` or `INT8`.
        shape: of the drafts.
        law: of the numbers accepted; None in plain decoding.
        forwards: of the target in a cycle, for the model; empty: there is none.
    """

    system: str
    cache: str
    shape: TreeShape = PLAIN
    law: Law | None = None
    forwards: tuple[Forward, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        cycles: counted.
        warmup: cycles before them, 2 or more: the first compiles, the second is recorded.
        fill: one of `FILLS`.
        seed: of ids, rows and the order of accepted numbers.
        sampling: processors.

    Raises:
        ConfigError: no such fill, or too few cycles.
    """

    cycles: int = 64
    warmup: int = 4
    fill: str = "random"
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise ConfigError(f"suite.fill={self.fill}; allowed: {', '.join(FILLS)}")
        if self.cycles < 1 or self.warmup < 2:
            raise ConfigError(
                f"suite.cycles={self.cycles} suite.warmup={self.warmup}; allowed: 1 or more counted, 2 or "
                "more before them"
            )


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        way: what decodes.
        context: tokens cached before.
        batch: sequences.
        split: take cycles apart too.
    """

    way: Way
    context: int
    batch: int = 1
    split: bool = False


@dataclass(frozen=True)
class Group:
    """Cells that decode with the same parts.

    Args:
        attach: makes draft and cache for a target.
        cells: measured in this order.
    """

    attach: Callable[[Target], Parts]
    cells: tuple[Cell, ...]


def facts(cell: Cell) -> dict[str, Any]:
    """What a row is about."""
    way = cell.way
    row: dict[str, Any] = {
        "system": way.system,
        "cache": way.cache,
        "name": name_of(way),
        "shape": list(way.shape.widths),
        "drafted": way.shape.depth,
        "prompt_tokens": cell.context,
        "batch": cell.batch,
    }
    if way.law is not None:
        row["accepted"] = way.law.source | {"tokens_per_cycle": way.law.tokens_per_cycle}
    return row


def name_of(way: Way) -> str:
    """For people: what decodes, and what it drafts."""
    if not way.shape.widths:
        return f"{way.system}, {way.cache} cache"
    chain = set(way.shape.widths) == {1}
    drafted = f"{way.shape.depth}" if chain else "-".join(map(str, way.shape.widths))
    return f"{way.system} {drafted}"
