"""The keys of `suite=elastic`, and the modes of storing and transferring KV entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from longtrain.bench.suites import Auto
from longtrain.cache.elastic import Offloading
from longtrain.cache.entry_sets import ReadBudget
from longtrain.errors import ConfigError
from longtrain.settings import Count, CountOrZero, Counts, OneOf, Positive, Share, Tokens, Words, within

RESIDENT_GIB = 2.0**20
"""A cap that is never reached: every layer stays on the device."""
MODES = {
    "gpu": Offloading(memory_gib=RESIDENT_GIB),
    "sync_all": Offloading(prefetch=False, difference=False),
    "sync_difference": Offloading(prefetch=False),
    "async_all": Offloading(difference=False),
    "async_difference": Offloading(),
}
"""Modes: all entries on the device; or entries on the host, of which whole sets or only new entries are
transferred, before the step or on a side stream."""
FULL, FULL_HOST, ADAPTIVE = "full", "full_host", "adaptive"
SYSTEMS = (FULL, FULL_HOST, *MODES, ADAPTIVE)
"""Systems: full attention with the cache on the device, or transferred from the host layer by layer; sparse
decoding in a mode; and sparse decoding with as many layers on the device as a cap allows."""


@dataclass(frozen=True)
class ElasticSettings:
    """The keys of `suite=elastic`.

    Args:
        shape: a published shape with random weights, or the keys of a `config.json`.
        lengths: tokens in the cache; empty: no steps at fixed lengths.
        budgets: KV entries that a KV head reads at each step.
        overlap: share of a set's entries that are selected again at the next step.
        sinks: first entries that are always read.
        window: last entries that are always read.
        batch: sequences.
        modes: the timed `MODES`.
        side_by_side: numbers of neighbouring layers whose entries of a token are contiguous on the host; the
            modes are timed with each.
        steps: counted steps.
        warmup: steps before them.
        growth: lengths at which steps are timed under a cap, ascending; empty: none.
        growth_gib: that cap, in GiB of keys and values on the device.
        mixes: workloads, as prompt tokens and output tokens, whose throughput is estimated.
        mix_systems: the `SYSTEMS` that serve them.
        mix_gib: cap of keys and values on the device in GiB, which determines the batch.
        mix_host_gib: cap of keys and values on the host in GiB, likewise.
        mix_points: number of lengths from a prompt to its last token at which steps are timed.

    `growth` and `mixes` use only the first of `budgets` and of `side_by_side`.
    """

    shape: Annotated[str | dict[str, Any], Auto("llama31_8b", "llama_micro")]
    lengths: tuple[Tokens, ...]
    budgets: Counts
    overlap: Share = 0.65
    sinks: CountOrZero = 4
    window: CountOrZero = 64
    batch: Count = 1
    modes: tuple[Annotated[str, OneOf(*MODES)], ...] = tuple(MODES)
    side_by_side: Counts = (Offloading().side_by_side,)
    steps: Count = 64
    warmup: Annotated[int, within(2)] = 4
    growth: tuple[Tokens, ...] = ()
    growth_gib: Positive = 1.0
    mixes: Annotated[
        tuple[tuple[Tokens, Tokens], ...],
        Words("pairs of token counts, prompt and output, such as [[2k, 16k]]"),
    ] = ()
    mix_systems: tuple[Annotated[str, OneOf(*SYSTEMS)], ...] = (FULL, ADAPTIVE)
    mix_gib: Positive = 16.0
    mix_host_gib: Positive = 48.0
    mix_points: Annotated[int, within(2)] = 3

    def __post_init__(self) -> None:
        if list(self.growth) != sorted(set(self.growth)):
            raise ConfigError(f"suite.growth={list(self.growth)}; allowed: lengths, ascending")
        if self.lengths and min(self.lengths) < max(self.budgets):
            raise ConfigError(
                f"suite.budgets={list(self.budgets)} rows, read of {min(self.lengths)} tokens; allowed: "
                f"lengths of {max(self.budgets)} or more, or smaller budgets"
            )

    @property
    def read_budgets(self) -> list[ReadBudget]:
        """Return the read budgets of the steps.

        Raises:
            ConfigError: a budget is not larger than sinks and window.
        """
        return [ReadBudget(rows, self.sinks, self.window) for rows in self.budgets]
