"""Acceptance of drafts over context lengths: the runs. The figures made of them are in `scores`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Law, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.errors import ConfigError
from longtrain.evaluation.contexts import Point
from longtrain.evaluation.exactness import Exactness, compare

if TYPE_CHECKING:
    from longtrain.target.model import Target

Advance = Callable[[str, int], None]
"""Called with (what is running, prompts done since the last call)."""


@dataclass(frozen=True)
class Variant:
    """A draft used in one way: what the columns of the table are.

    Args:
        name: unique; the artifact's and, where there are several, the shape's.
        parts: the artifact attached to the target.
        shape: what is drafted each cycle.
    """

    name: str
    parts: Parts
    shape: TreeShape


PLAIN = Variant("plain", Parts(), TreeShape(()))
"""Decoding without a draft."""


@dataclass(frozen=True)
class Protocol:
    """What is asked of every variant.

    Args:
        lengths: context lengths, tokens.
        points: continuation points, the same at every length.
        prefix: special tokens that begin a prompt.
        max_new_tokens: tokens to generate.
        batch: prompts decoded together.
        sampling: temperature and so on.
        ignore_eos: go on past the end of text.
        compare: decode plainly too, and compare the texts.
    """

    lengths: tuple[int, ...]
    points: list[Point]
    prefix: tuple[int, ...] = ()
    max_new_tokens: int = 128
    batch: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = True
    compare: bool = True

    def prompts(self, length: int) -> list[list[int]]:
        """The prompts of a context length, in the order of `points`."""
        return [point.prompt(length, self.prefix) for point in self.points]


@dataclass(frozen=True)
class Cell:
    """A variant at a context length. `stats.rows` and `tokens` follow the protocol's points."""

    length: int
    tokens: list[list[int]]
    stats: Stats
    exactness: Exactness | None = None


@dataclass(frozen=True)
class Runs:
    """Everything that was generated: cells by variant name, then by length; `plain` where it was compared."""

    cells: dict[str, list[Cell]]
    plain: list[Cell]


def run_acceptance(
    target: Target,
    variants: Sequence[Variant],
    protocol: Protocol,
    *,
    advance: Advance = lambda what, done: None,
) -> Runs:
    """Decode every prompt with every variant, and plainly.

    Args:
        target: the frozen model.
        variants: at least one; names must differ.
        protocol: what to decode.
        advance: told of progress.

    Raises:
        ConfigError: two variants of one name, or a length that the target's context does not hold.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise ConfigError(f"variants {names} do not differ in name; give each artifact and shape once")
    most = target.info.max_positions - protocol.max_new_tokens
    if max(protocol.lengths) > most:
        raise ConfigError(
            f"length {max(protocol.lengths)} with {protocol.max_new_tokens} new tokens exceeds the target's "
            f"context of {target.info.max_positions}; pass lengths of at most {most}"
        )
    cells: dict[str, list[Cell]] = {name: [] for name in names}
    plain: list[Cell] = []
    for length in protocol.lengths:
        prompts = protocol.prompts(length)
        if protocol.compare:
            plain.append(_decode(target, PLAIN, prompts, protocol, advance))
        for variant in variants:
            cell = _decode(target, variant, prompts, protocol, advance)
            if protocol.compare and (protocol.sampling.greedy or variant.shape.law is Law.POINT):
                found = compare(
                    target, prompts, plain[-1].tokens, other=cell.tokens, greedy=protocol.sampling.greedy
                )
                cell = replace(cell, exactness=found)
            cells[variant.name].append(cell)
    return Runs(cells, plain)


def _decode(
    target: Target, variant: Variant, prompts: list[list[int]], protocol: Protocol, advance: Advance
) -> Cell:
    length = len(prompts[0])
    limits = Limits(protocol.batch, length + protocol.max_new_tokens, variant.shape.n_nodes)
    engine = Engine(target, variant.parts, limits=limits)
    tokens: list[list[int]] = []
    stats = Stats()
    for first in range(0, len(prompts), protocol.batch):
        some = prompts[first : first + protocol.batch]
        generation = engine.generate(
            some,
            max_new_tokens=protocol.max_new_tokens,
            sampling=protocol.sampling,
            shape=variant.shape,
            ignore_eos=protocol.ignore_eos,
            sequence_ids=range(first, first + len(some)),
        )
        tokens += generation.tokens
        stats = stats + generation.stats
        advance(f"{variant.name} @ {length}", len(some))
    return Cell(length, tokens, stats)
