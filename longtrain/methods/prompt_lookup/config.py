"""Settings of prompt look-up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.errors import ConfigError


@dataclass
class Config:
    """Drafts copied from the text itself, prompt and answer alike (LLMA, arXiv 2304.04487)."""

    ngram: int = 3  # most tokens at the end of the text that are looked up; fewer where these are not found

    def __post_init__(self) -> None:
        if not 1 <= self.ngram <= 16:
            raise ConfigError(f"method.ngram={self.ngram}; allowed: 1 to 16 tokens")
