"""What eviction is made of: a budget, the rows to keep, and the prompt's run that a policy may look at.

Shapes: L layers, B batch, S prompt tokens, K kept rows, H query heads, G KV heads, D head dim, V vocabulary,
N observing rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.target.attention import Watch

if TYPE_CHECKING:
    from longtrain.cache.dense import DenseCache
    from longtrain.target.model import Target


@dataclass(frozen=True)
class Budget:
    """Rows kept of each layer and KV head, on average: a number of tokens, or a share of the prompt.

    Args:
        tokens: rows; None where `ratio` is given.
        ratio: share of the prompt kept, above 0 and at most 1; None where `tokens` is given.

    Raises:
        ConfigError: neither or both are given, or a value out of range.
    """

    tokens: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.ratio is None):
            raise ConfigError(
                f"eviction budget tokens={self.tokens} ratio={self.ratio}; give one: "
                "evict.budget_tokens=128 or evict.budget_ratio=0.1"
            )
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"evict.budget_tokens={self.tokens}; allowed: 1 or more")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise ConfigError(f"evict.budget_ratio={self.ratio}; allowed: above 0, at most 1")

    def of(self, length: int) -> int:
        """Rows for a prompt of `length` tokens; at least 1. May be above `length`: then nothing is evicted."""
        return self.tokens if self.tokens is not None else max(1, int(length * (self.ratio or 0)))


@dataclass(frozen=True)
class Keep:
    """Rows of the prompt that stay, for every layer, sequence and KV head.

    Args:
        idx_LBGK: positions, int64 on the device, ascending over the first `n` of each; what follows is 0.
        n_LBG: how many, int64 *on the host*: a policy whose counts depend on scores pays the one read here.
    """

    idx_LBGK: Tensor
    n_LBG: Tensor


class Evictor(Protocol):
    """Chooses, once after prefill, what of the cache stays: LookaheadKV, SnapKV, KVzip."""

    name: str
    """For messages and tables."""

    def extra_rows(self, longest: int) -> int:
        """Tail rows that `select` needs in the prompt's cache beyond the prompt (pseudo answers, say)."""

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        """What is to see the prefill's queries, keys and values (right-padded to the longest); None: nothing.

        It is made anew for every prefill and handed back in `PromptRun.watched`.
        """

    def select(self, run: PromptRun) -> Keep | None:
        """Which rows stay; None where every prompt fits its budget, which leaves the cache as it is."""


@dataclass
class PromptRun:
    """A prefilled batch, as an evictor sees it. The cache holds every prompt whole and is not to be changed
    but through the methods here.

    Args:
        target: the frozen model.
        cache: the prompts' cache, committed.
        lengths: tokens of each prompt, on the host.
        tokens_BS: prompts, right-padded.
        n_B: `lengths` on the device.
        root_B: the first answer token of each prompt, as the target chooses it greedily.
        watched: what `Evictor.watch` gave for this prefill.
        max_new_tokens: most tokens of the answer that is to come.
    """

    target: Target
    cache: DenseCache
    lengths: tuple[int, ...]
    tokens_BS: Tensor
    n_B: Tensor
    root_B: Tensor
    watched: Watch | None = None
    max_new_tokens: int = 0

    def follow(self, tokens: Sequence[Sequence[int]], watch: Watch) -> None:
        """Run more rows after each prompt (teacher-forced, right-padded) and forget them again.

        Args:
            tokens: rows of each prompt; their positions go on from the prompt's length.
            watch: sees their queries, keys and values, [B, ., T, D].
        """
        raise NotImplementedError

    def decode(
        self, n_tokens: int, *, keep: Keep | None = None, watch: Watch | None = None
    ) -> list[list[int]]:
        """Continue each prompt greedily and forget it again: the first `n_tokens` of the answer.

        Args:
            n_tokens: tokens; a sequence that ends earlier is given what there is, its end included.
            keep: decode on a copy with these rows alone (LAQ); None: on the whole cache (oracle).
            watch: sees the queries, keys and values of every decoding step (T = 1 a step).
        """
        raise NotImplementedError
