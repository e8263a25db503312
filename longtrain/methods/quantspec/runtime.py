"""The draft at work: plain decoding with the target's own layers over a cheaper reading of its own cache.

Shapes: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from longtrain.cache.hierarchical import DraftView, HierarchicalCache
from longtrain.decoding.growth import Level, TreeGrowth, check_chain
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Coins, Sampling
from longtrain.errors import ConflictError
from longtrain.targets.int4 import Int4Target
from longtrain.targets.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.model import Target


class QuantSpecRuntime:
    """Proposes chains (`decoding.roles.Draft`).

    Its rows lie in the ring behind the committed ones until the target's step overwrites them, so there is no
    state of its own and nothing to roll back.

    Args:
        model: the target, or the target with 4-bit weights.
        kv_bits: the bits that quantised tokens are read with.

    Source: QuantSpec §4.1 and Algorithm 1.
    """

    want = Want()

    def __init__(self, model: Target, *, kv_bits: int) -> None:
        self.model, self.kv_bits = model, kv_bits
        self.view: DraftView | None = None
        self._growth = TreeGrowth()

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Take the draft's view of the target's cache.

        Raises:
            ConflictError: the cache is not a hierarchical one.
        """
        if not isinstance(cache, HierarchicalCache):
            raise ConflictError(
                f"QuantSpec drafts on a hierarchical KV cache, not on a {type(cache).__name__}; give the "
                "engine the cache that comes with it"
            )
        self.view = cache.draft_view(self.kv_bits)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that is no chain (`decoding.roles.Draft`)."""
        check_chain(shape, "QuantSpec")

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, coins: Coins) -> TokenTree:
        """Draft a chain below the root: the argmax of each step, or a token drawn from its law.

        Raises:
            ConfigError: a shape that is no chain.
            ConflictError: called before `start`.
        """
        view = self.view
        if view is None:
            raise ConflictError("a QuantSpec draft was asked before start(); run it through Engine.generate")
        self.check_shape(shape)
        view.restart()
        pos_JB = view.len_B + self._growth.depths(shape, root_B.device)[:, None]

        def logits_of(level: Level) -> Tensor:
            pos_B = pos_JB[level.depth]
            out = self.model.forward(Rows(pos_B[:, None], level.tokens_BM), view, want=Want("last"))
            view.commit(None, pos_B)  # all of its rows: the view asks for no count
            assert out.logits_BTV is not None
            return out.logits_BTV

        return self._growth.grow(logits_of, root_B, view.len_B, shape, sampling, coins)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Nothing to do: what was accepted is in the cache."""

    def bytes(self) -> int:
        """Bytes of the 4-bit weights."""
        return self.model.int4_bytes() if isinstance(self.model, Int4Target) else 0

    def tensors(self) -> tuple[Tensor, ...]:
        """An empty tuple: the draft keeps no tensors, and those of the cache belong to the cache."""
        return ()
