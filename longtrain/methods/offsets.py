"""Draws the anchor offsets of a training batch (LongSpec), for every draft whose settings have them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from longtrain.data.packing import packed_sequences
from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.targets.info import TargetInfo


class OffsetSettings(Protocol):
    """The settings of a method that determine the offsets."""

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
    """Draw the position offset of each document from the batch's seed; None if offsets are off.

    Args:
        settings: the method's settings.
        info: the target's facts.
        batch: the batch.
    """
    if not settings.anchor_offset:
        return None
    return packed_sequences.draw_offsets(
        [b - a for a, b in pairwise(batch.bounds)],
        usable=settings.offset_max_tokens or info.max_positions,
        max_doc_tokens=settings.offset_max_doc_tokens,
        seed=batch.seed,
    )
