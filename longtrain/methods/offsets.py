"""Anchor-Offset Indices of a training row, for every draft whose settings have them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from longtrain.data.rows import packed_rows
from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from longtrain.data.rows.batch import Batch
    from longtrain.targets.info import TargetInfo


class OffsetSettings(Protocol):
    """The keys of a method's settings that offsets follow from."""

    anchor_offset: bool
    offset_max_tokens: int
    offset_max_doc_tokens: int


def check_offsets(settings: OffsetSettings, info: TargetInfo) -> None:
    """Refuse offsets beyond the target's context.

    Raises:
        ConfigError: `offset_max_tokens` is more than the target's positions.
    """
    if settings.anchor_offset and settings.offset_max_tokens > info.max_positions:
        raise ConfigError(
            f"method.offset_max_tokens={settings.offset_max_tokens} is beyond the {info.max_positions} "
            f"positions of {info.name}; pass at most {info.max_positions}, 0 (all of them), or "
            f"target.max_positions if its RoPE scaling reaches further"
        )


def offsets_of(settings: OffsetSettings, info: TargetInfo, batch: Batch) -> list[int] | None:
    """How far each document of a batch is moved, drawn from its seed; None where offsets are off.

    Args:
        settings: the method's.
        info: the target's facts.
        batch: the row.
    """
    if not settings.anchor_offset:
        return None
    return packed_rows.draw_offsets(
        [b - a for a, b in pairwise(batch.bounds)],
        usable=settings.offset_max_tokens or info.max_positions,
        max_doc_tokens=settings.offset_max_doc_tokens,
        seed=batch.seed,
    )
