"""The role that says which rows of the cache each decoding step reads.

Two kinds share it. One scores rows before the target's forward, for sets that layers share (`table_LG`): what
is to be read is then known before any layer runs, and can be fetched. The other is asked in each layer, with
the layer's own queries and keys. Neither chooses: `cache.row_sets` takes the best of its scores.

Row s of the cache is that of token s of the text. Sets are chosen from what is known when a step begins: the
committed rows, what `observe` told of them, and the root, whose own row is read in any case.

Shapes: L layers, B batch, S slots or prompt tokens, T rows of a step, X sets, H query heads, G KV heads,
D head dim.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from torch import Tensor

from longtrain.cache.row_sets import ReadBudget
from longtrain.cache.selected import SelectedCache
from longtrain.errors import ConfigError, ConflictError
from longtrain.targets.step import TargetStep, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import TokenTree, Verdict
    from longtrain.targets.model import Target


class Selector:
    """Scores the committed rows for each step; subclasses say how.

    Args:
        budget: how many rows are read, and which in any case.
    """

    name = ""
    want = Want()
    """What it needs of every target forward (`hidden`)."""
    table_LG: Tensor | None = None
    """The set that each KV head of each layer reads, int64 on the host, for one that scores before the
    forward; None: it is asked in each layer, whose KV heads have sets of their own."""

    def __init__(self, budget: ReadBudget) -> None:
        self.budget = budget
        self.cache: SelectedCache | None = None

    def serves(self, cache: KVCache) -> SelectedCache:
        """The cache, once it has the room that reading chosen rows takes: before prompts are read.

        Raises:
            ConflictError: it reads no chosen rows, or none that are chosen within the layers.
            ConfigError: the budget does not suit it.
        """
        if not isinstance(cache, SelectedCache):
            raise ConflictError(
                f"{self.name} chooses rows, and a {type(cache).__name__} cannot read chosen rows alone; "
                "leave the cache out"
            )
        cache.reserve(self.budget, within_layers=self.table_LG is None)
        return cache

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """After prefill, which reads everything: `tokens_BS[b, :n_B[b]]` are committed in the cache.

        Raises:
            ConflictError: see `serves`.
        """
        self.cache = cache = self.serves(cache)
        ask = self.at_layer if self.table_LG is None else None
        cache.begin(self.budget, table_LG=self.table_LG, ask=ask)

    def ahead(self, root_B: Tensor) -> Tensor:
        """Scores before the forward of a step, where there is a `table_LG`.

        Args:
            root_B: the step's first token, at position `cache.len_B`; known tokens end with it.

        Returns: scores_BXS in fp32 or wider, of the cache's `used` slots or more; only their order within a
            set counts. Slots from `cache.len_B` on may hold anything, and so may sequences that are not due.
        """
        raise NotImplementedError

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Scores within a layer, where there is no `table_LG`; asked in every layer of every step.

        Args:
            layer: which.
            q_BHTD: queries of the step's rows, root first. Scores must follow from the root's alone, or from
                earlier steps.
            k_BGSD: keys in the cache's `used` slots.
            len_B: committed rows.

        Returns: scores_BGS.
        """
        raise NotImplementedError

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """After a step and the cache's commit: `verdict.n_B` nodes were accepted."""

    def with_budget(self, budget: Budget) -> Self:
        """The same rule with as many rows, sharing all weights.

        Raises:
            ConfigError: a share of the prompt; sets have one size.
        """
        if budget.tokens is None:
            raise ConfigError(
                f"{self.name} reads sets of one size, and the budget is {budget.ratio} of the prompt; pass a "
                "number of rows: suite.budgets=[512,1024]"
            )
        other = copy.copy(self)
        other.budget, other.cache = replace(self.budget, rows=budget.tokens), None
        return other

    def bytes(self) -> int:
        """Bytes of state held beside the cache."""
        return 0

    def tensors(self) -> tuple[Tensor, ...] | None:
        """Its state, where steps update it in place and ask the host nothing; else None (`roles.Draft`)."""
        return None


def choose(selector: Selector, root_B: Tensor) -> None:
    """Before each step of the target, and as early as the root is known."""
    assert selector.cache is not None, "start() comes first"
    selector.cache.choose(None if selector.table_LG is None else selector.ahead(root_B))


def new_selected_cache(target: Target, batch: int, max_tokens: int, max_nodes: int) -> SelectedCache:
    """An empty cache that reads chosen rows, called as `Target.new_cache` is."""
    return SelectedCache(target.new_cache(batch, max_tokens, max_nodes))
