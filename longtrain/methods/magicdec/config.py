"""Settings of self-speculation with a sparse cache. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.errors import ConfigError
from longtrain.methods import beside

POLICIES = ("streaming_llm", "snapkv")


@dataclass
class Config:
    """A draft that is the target itself, on a part of the context (MagicDec, arXiv 2408.11049, §4).

    The budget is the one that QuantSpec gives these drafts (arXiv 2502.10424, §5): as many bytes as its own
    4-bit cache has.
    """

    policy: str = "streaming_llm"  # rows of the context: streaming_llm (first and newest), snapkv (by scores)
    budget: float = 0.25  # share of the prompt's rows that the draft has, of each layer and KV head
    least_tokens: int = 128  # rows that the draft has in any case; shorter prompts are read whole
    sinks: int = 4  # streaming_llm: first rows that stay
    window: int = 32  # snapkv: last rows of the prompt whose attention chooses
    kernel: int = 7  # snapkv: rows of the max-pool over scores, odd; 1: off
    recent_tokens: int = 512  # snapkv: newest rows of the text among the budget, at most half of it
    cache: str = "plain"  # the target's: plain, or hierarchical (QuantSpec's INT8, with its defaults)

    def __post_init__(self) -> None:
        beside.check_cache(self.cache)
        if self.policy not in POLICIES:
            raise ConfigError(f"method.policy={self.policy}; allowed: {', '.join(POLICIES)}")
        if not 0 < self.budget <= 1:
            raise ConfigError(
                f"method.budget={self.budget}; allowed: above 0, at most 1 (a share of the prompt)"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"method.kernel={self.kernel}; allowed: 1 (off), 3, 5, 7, ...")
        if self.sinks < 0 or self.window < 1 or self.recent_tokens < self.window:
            raise ConfigError(
                f"method.sinks={self.sinks} method.window={self.window} "
                f"method.recent_tokens={self.recent_tokens}; allowed: 0 or more sinks, 1 or more rows of the "
                "window, and no fewer recent ones"
            )
        least = self.sinks + 1 if self.policy == "streaming_llm" else 2 * self.window
        if self.least_tokens < least:
            raise ConfigError(
                f"method.least_tokens={self.least_tokens}; allowed: {least} or more: the sinks and one "
                "row, or twice the window"
            )

    def newest(self, rows: int) -> int:
        """How many of a budget of `rows` hold the newest tokens of the text."""
        if self.policy == "streaming_llm":
            return rows - self.sinks
        return min(self.recent_tokens, rows // 2)
