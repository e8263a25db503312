"""Settings of self-speculation with a sparse cache. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.methods import target_cache
from longtrain.settings import Count, CountOrZero, Kernel, OneOf, Positive, check, wrong


@dataclass
class Config:
    """A draft that is the target itself with a part of the KV cache (MagicDec, arXiv 2408.11049, §4).

    The default budget is the one in QuantSpec's comparison (arXiv 2502.10424, §5): as many bytes as
    QuantSpec's 4-bit cache.
    """

    policy: Annotated[str, OneOf("streaming_llm", "snapkv")] = "streaming_llm"  # KV entries that the draft
    # reads: streaming_llm (first and newest), snapkv (by scores)
    budget: Positive = 0.25  # share of the prompt's KV entries that the draft reads, in each layer and KV
    # head
    least_tokens: Count = 128  # KV entries that the draft reads at least; shorter prompts are read whole
    sinks: CountOrZero = 4  # streaming_llm: first tokens that stay
    window: Count = 32  # snapkv: last tokens of the prompt whose attention chooses
    kernel: Kernel = 7  # snapkv: width of the max-pooling over scores, odd; 1: off
    recent_tokens: Count = 512  # snapkv: newest tokens among the budget, at most half of it
    cache: target_cache.TargetCache = (
        "plain"  # the target's: plain, or hierarchical (QuantSpec's INT8, with its defaults)
    )

    def __post_init__(self) -> None:
        check(self, "method")
        if self.budget > 1:
            raise wrong("method.budget", self.budget, "above 0, at most 1 (a share of the prompt)")
        if self.recent_tokens < self.window:
            raise wrong("method.recent_tokens", self.recent_tokens, f"method.window={self.window} or more")
        least = self.sinks + 1 if self.policy == "streaming_llm" else 2 * self.window
        if self.least_tokens < least:
            raise wrong(
                "method.least_tokens",
                self.least_tokens,
                f"{least} or more: the sinks and one entry, or twice the window",
            )

    def newest(self, rows: int) -> int:
        """Return how many KV entries of a budget of `rows` are for the newest tokens."""
        if self.policy == "streaming_llm":
            return rows - self.sinks
        return min(self.recent_tokens, rows // 2)
