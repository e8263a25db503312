"""Settings of selection without training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from longtrain.errors import ConfigError
from longtrain.settings import Count, CountOrZero, OneOf, Share, check

OPTIONS: dict[str, tuple[str, ...]] = {
    "window": (),
    "random": ("seed",),
    "quest": ("page", "prompt_only"),
    "clusterkv": ("cluster_tokens", "cluster_every", "new_clusters", "iterations", "prompt_only"),
    "shadowkv": ("chunk", "outliers", "prompt_only"),
    "previous": (),
    "reused": ("layer",),
    "shared_oracle": ("groups", "all_heads"),
    "oracle": (),
}
"""Rule -> its own options."""


@dataclass
class Config:
    """Untrained rule that selects the KV entries each step reads; `evict.budget_tokens` is their number.

    Rules: window (sinks and the newest entries), random, quest (pages by an upper bound), clusterkv (clusters
    by their centroids), shadowkv (chunks by their means), previous (entries the previous step attended to),
    reused (entries one layer attends to, for all layers), shared_oracle and oracle (entries that all layers
    together, or each layer, attend to).
    """

    rule: Annotated[str, OneOf(*OPTIONS)] = "window"  # how KV entries are scored: window, random, quest,
    # clusterkv, shadowkv, previous, reused, shared_oracle, oracle
    page: Count = 16  # quest: tokens of a page (the paper's)
    cluster_tokens: Count = 80  # clusterkv: prompt tokens a cluster, on average (the paper's)
    cluster_every: Count = 320  # clusterkv: generated tokens that are clustered together (the paper's)
    new_clusters: Count = 4  # clusterkv: clusters of each `cluster_every` generated tokens (the paper's)
    iterations: Count = 10  # clusterkv: most rounds of k-means
    chunk: Count = 8  # shadowkv: tokens of a chunk (the paper's)
    outliers: Share = 0.003  # shadowkv: share of the prompt's chunks that is always read (the paper's)
    layer: CountOrZero = 2  # reused: the layer whose choice all layers read
    groups: Count = 1  # shared_oracle: groups of neighbouring layers, each with its own choice
    all_heads: bool = False  # shared_oracle: KV heads share one choice too
    prompt_only: bool = False  # quest, clusterkv, shadowkv: generated tokens are read first, as in their
    # papers
    seed: CountOrZero = 0  # random: seed of the choice

    def __post_init__(self) -> None:
        check(self, "method")
        for field in fields(self):
            own = field.name == "rule" or field.name in OPTIONS[self.rule]
            if not own and getattr(self, field.name) != field.default:
                known = ", ".join(f"method.{name}" for name in OPTIONS[self.rule]) or "none"
                raise ConfigError(
                    f"method.{field.name}={getattr(self, field.name)} is no option of "
                    f"method.rule={self.rule}; its options: {known}"
                )
