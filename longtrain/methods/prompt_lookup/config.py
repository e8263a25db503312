"""Settings of prompt look-up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.errors import ConfigError
from longtrain.methods import beside


@dataclass
class Config:
    """Drafts copied from the text itself, prompt and answer alike (LLMA, arXiv 2304.04487)."""

    ngram: int = 3  # most tokens at the end of the text that are looked up; fewer where these are not found
    cache: str = "plain"  # the target's: plain, or hierarchical (QuantSpec's INT8, with its defaults)

    def __post_init__(self) -> None:
        beside.check_cache(self.cache)
        if not 1 <= self.ngram <= 16:
            raise ConfigError(f"method.ngram={self.ngram}; allowed: 1 to 16 tokens")
