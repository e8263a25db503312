"""Settings of prompt look-up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.methods import target_cache
from longtrain.settings import check, within


@dataclass
class Config:
    """Drafts copied from the text itself, prompt and answer alike (LLMA, arXiv 2304.04487)."""

    ngram: Annotated[int, within(1, 16)] = 3  # tokens at the end of the text that are looked up; fewer if
    # they are not found
    cache: target_cache.TargetCache = (
        "plain"  # the target's: plain, or hierarchical (QuantSpec's INT8, with its defaults)
    )

    def __post_init__(self) -> None:
        check(self, "method")
