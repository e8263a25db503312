"""The interface of selectors, which score the KV entries that each decoding step reads.

There are two kinds. One scores entries before the target's forward, for sets that layers share (`table_LG`):
the entries to read are then known before any layer runs, and can be fetched. The other scores within each
layer, from its own queries and keys. `cache.entry_sets` takes the best of the scores.

Entry s of the cache belongs to token s of the text. Sets are selected from the information at the start of a
step: the committed entries, the outputs passed to `observe`, and the root, whose own entry is always read.

Shapes: L layers, B batch, S cache positions or prompt tokens, T tokens of a step, X sets, H query heads, G KV
heads, D head dim.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from torch import Tensor

from longtrain.cache.entry_sets import ReadBudget
from longtrain.cache.selected import SelectedCache
from longtrain.errors import ConfigError, ConflictError
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import TokenTree, Verdict
    from longtrain.targets.model import Target


class Selector:
    """Base class: scores the committed entries for each step.

    Args:
        budget: number of entries to read, and those that are always read.
    """

    name = ""
    outputs = OutputRequest()
    """Outputs that it needs from every target forward (`hidden`)."""
    table_LG: Tensor | None = None
    """Index of the set that each KV head of each layer reads, int64 on the host, for a selector that scores
    before the forward; None: it scores within each layer, and every KV head has a set of its own."""

    def __init__(self, budget: ReadBudget) -> None:
        self.budget = budget
        self.cache: SelectedCache | None = None

    def serves(self, cache: KVCache) -> SelectedCache:
        """Check the cache and let it allocate memory for the sets, before prompts are read.

        Raises:
            ConflictError: the cache cannot read selected entries, or not those selected within layers.
            ConfigError: the budget does not fit the cache.
        """
        if not isinstance(cache, SelectedCache):
            raise ConflictError(
                f"{self.name} selects KV entries, and a {type(cache).__name__} cannot read selected ones "
                "alone; leave the cache out"
            )
        cache.reserve(self.budget, within_layers=self.table_LG is None)
        return cache

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Called after prefill, which reads everything: `tokens_BS[b, :n_B[b]]` are committed.

        Raises:
            ConflictError: see `serves`.
        """
        self.cache = cache = self.serves(cache)
        ask = self.at_layer if self.table_LG is None else None
        cache.begin(self.budget, table_LG=self.table_LG, ask=ask)

    def ahead(self, root_B: Tensor) -> Tensor:
        """Score entries before the forward of a step, for selectors with a `table_LG`.

        Args:
            root_B: the step's first token, at position `cache.len_B`, the last known one.

        Returns: scores_BXS in fp32 or wider, of the cache's `used` positions or more; only their order within
            a set counts. Undefined from `cache.len_B` on, and for sequences that are not due.
        """
        raise NotImplementedError

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Score entries within a layer, for selectors without `table_LG`; called in every layer.

        Args:
            layer: index of the layer.
            q_BHTD: queries of the step's tokens, root first. Scores may depend on the root's query and on
                earlier steps only.
            k_BGSD: keys at the cache's `used` positions.
            len_B: committed entries.

        Returns: scores_BGS.
        """
        raise NotImplementedError

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Called after a step and the cache's commit with the `verdict.n_B` accepted nodes."""

    def with_budget(self, budget: Budget) -> Self:
        """The same selector with another budget, sharing all weights.

        Raises:
            ConfigError: a share of the prompt; sets have one size.
        """
        if budget.tokens is None:
            raise ConfigError(
                f"{self.name} reads sets of one size, and the budget is {budget.ratio} of the prompt; pass a "
                "number of entries: suite.budgets=[512,1024]"
            )
        other = copy.copy(self)
        other.budget, other.cache = replace(self.budget, rows=budget.tokens), None
        return other

    def bytes(self) -> int:
        """Bytes of state beside the cache."""
        return 0

    def tensors(self) -> tuple[Tensor, ...] | None:
        """State tensors if steps update them in place and without host reads, else None (`roles.Draft`)."""
        return None


def choose(selector: Selector, root_B: Tensor) -> None:
    """Select the entries of the coming step; called as soon as the root is known."""
    assert selector.cache is not None, "start() comes first"
    selector.cache.choose(None if selector.table_LG is None else selector.ahead(root_B))


def new_selected_cache(target: Target, batch: int, max_tokens: int, max_nodes: int) -> SelectedCache:
    """An empty cache that reads selected entries; same arguments as `Target.new_cache`."""
    return SelectedCache(target.plain_cache(batch, max_tokens, max_nodes))
