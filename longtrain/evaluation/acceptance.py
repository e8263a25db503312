"""Acceptance of drafts over context lengths: what is asked, and what comes of it. Figures: `scores`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.errors import ConfigError
from longtrain.evaluation.contexts import Point
from longtrain.evaluation.exactness import Exactness

if TYPE_CHECKING:
    from longtrain.targets.model import Target

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


def check(target: Target, names: Sequence[str], protocol: Protocol) -> None:
    """Refuse what cannot be measured.

    Args:
        target: the frozen model.
        names: of the variants.
        protocol: what is asked of them.

    Raises:
        ConfigError: two variants of one name, or a length that the target's context does not hold.
    """
    if len(set(names)) != len(names):
        raise ConfigError(f"variants {list(names)} do not differ in name; give each artifact and shape once")
    most = target.info.max_positions - protocol.max_new_tokens
    if max(protocol.lengths) > most:
        raise ConfigError(
            f"length {max(protocol.lengths)} with {protocol.max_new_tokens} new tokens exceeds the target's "
            f"context of {target.info.max_positions}; pass lengths of at most {most}"
        )
