"""Settings of prompt look-up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.methods import target_cache
from longtrain.settings import OneOf, check, made_by, within

Lookup = Annotated[
    str, OneOf("auto", "off", "only"), made_by(lambda value: "off" if value is False else value)
]
"""Look-up beside a draft: `auto` joins it, `only` puts it in the draft's place. YAML reads off as false."""


@dataclass
class Config:
    """Drafts copied from the text itself, prompt and answer alike (SAM decoding, arXiv 2411.10666)."""

    ngram: Annotated[int, within(1, 128)] = 64  # most tokens at the end of the text that are looked up: the
    # longest match counts, as long as this; 3 for look-up by short n-grams
    cache: target_cache.TargetCache = (
        "plain"  # the target's: plain, or hierarchical (QuantSpec's INT8, with its defaults)
    )

    def __post_init__(self) -> None:
        check(self, "method")
