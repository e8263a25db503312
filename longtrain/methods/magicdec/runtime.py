"""The MagicDec draft: the target's own decoding steps over a part of the context.

Shapes: L layers, B batch, S prompt tokens, T tokens, N tree nodes, P path, H query heads, G KV heads, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.control import CHAINS
from longtrain.decoding.expansion import Level, TreeExpansion, check_chain
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.errors import ConfigError
from longtrain.methods.magicdec.choice import Choice, ScoredEntries, SinkEntries
from longtrain.methods.magicdec.sparse_cache import ROOM, Layout, SparseBuffers
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.methods.magicdec.config import Config
    from longtrain.targets.model import Target


class MagicDecRuntime:
    """Proposes chains (`decoding.roles.Draft`) and observes the target (`decoding.roles.AttentionObserver`).

    It copies the entries that it needs while the target prefills and verifies, so it works with any kind of
    target cache: beside a quantised cache its own entries are still in full precision, and after eviction it
    has entries that the target no longer has.

    Args:
        target: drafts for itself.
        config: settings.

    Source: MagicDec (arXiv 2408.11049) §4; QuantSpec (arXiv 2502.10424) §5 for the budget.
    Note: entries of accepted tokens are those that the target computed when it verified them, which costs
        nothing and leaves no gap when a whole chain is accepted. Positions are those of the text, not of the
        cache.
    """

    outputs = OutputRequest()

    def __init__(self, target: Target, config: Config) -> None:
        self.target, self.config = target, config
        self.most = min(ROOM, config.newest(config.least_tokens)) - 1
        """Longest chain: it must not overwrite its own start in the ring buffer of the shortest prompt."""
        self.offers = tuple(widths for widths in CHAINS if len(widths) <= self.most)
        self.rows: SparseBuffers | None = None
        self.cache: KVCache | None = None
        self._reader: _Reader | None = None
        self._nodes: dict[int, tuple[Tensor, Tensor]] = {}
        self._expansion = TreeExpansion()

    def prompt_hook(self, lengths: Sequence[int]) -> _Reader:
        """Return the observer of the prefill (see `AttentionObserver`)."""
        layout, target = Layout.of(lengths, self.config), self.target
        most = max(layout.rows)
        if self.rows is None or not self.rows.serves(target, len(lengths), most):
            if self.rows is not None:
                self.rows.arena.free()  # before the next buffers are allocated
            self.rows = None
            self.rows = SparseBuffers(target, len(lengths), most)
        self.rows.lay_out(layout)
        choice = (
            SinkEntries(layout)
            if self.config.policy == "streaming_llm"
            else ScoredEntries(layout, self.config, target)
        )
        self._reader = _Reader(self.rows, layout, choice)
        return self._reader

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Use the target's cache for its length alone, and store the tokens that followed the prompts."""
        assert self._reader is not None
        self.cache = cache
        self._reader.finish(n_B)
        self._reader = None

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that is no chain, or longer than the ring buffer allows (`decoding.roles.Draft`)."""
        check_chain(shape, "MagicDec")
        if shape.depth > self.most:
            raise ConfigError(
                f"a chain of {shape.depth} for MagicDec with method.least_tokens={self.config.least_tokens}; "
                f"allowed: up to {self.most} tokens"
            )

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft a chain below the root."""
        rows, cache = self._state()
        self.check_shape(shape)
        view = rows.restart(cache.len_B)
        pos_JB = cache.len_B + self._expansion.depths(shape, root_B.device)[:, None]

        def logits_of(level: Level) -> Tensor:
            step_rows = TokenBatch(pos_JB[level.depth, :, None], level.tokens_BM)
            out = self.target.forward(step_rows, view, outputs=OutputRequest("last"))
            view.commit(None, rows.one_B)
            assert out.logits_BTV is not None
            return out.logits_BTV

        return self._expansion.grow(logits_of, root_B, cache.len_B, shape, sampling, rng)

    def on_nodes(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Record one layer's keys and values of the tree nodes (see `AttentionObserver`)."""
        self._nodes[layer] = (k_BGTD, v_BGTD)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Store the accepted nodes' entries, as the target computed them."""
        rows, cache = self._state()
        path_BP, n_B = verdict.path_BP, verdict.n_B
        k_LBGND, v_LBGND = _stacked(self._nodes)
        if tree.copied and tree.depth_N.dim() == 2:  # no chain: look-up added a branch
            at = path_BP[None, :, None, :, None].expand(*k_LBGND.shape[:3], -1, k_LBGND.shape[4])
            k_LBGND, v_LBGND = k_LBGND.gather(3, at), v_LBGND.gather(3, at)
        step_P = torch.arange(path_BP.shape[1], device=n_B.device)
        pos_BP = (cache.len_B - n_B)[:, None] + step_P
        rows.take(k_LBGND, v_LBGND, pos_BP, step_P < n_B[:, None])
        self._nodes = {}

    def bytes(self) -> int:
        """Return the bytes of its entries: a share of the prompt's, independent of the generated length."""
        return 0 if self.rows is None else self.rows.bytes()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the buffers and counts of its entries."""
        return () if self.rows is None else self.rows.tensors()

    def _state(self) -> tuple[SparseBuffers, KVCache]:
        assert self.rows is not None and self.cache is not None
        return self.rows, self.cache


class _Reader:
    """Observes the prompts, and then the tokens that are prefilled after them (an `AttentionHook`)."""

    def __init__(self, rows: SparseBuffers, layout: Layout, choice: Choice) -> None:
        self.rows, self.choice = rows, choice
        self.seen: set[int] = set()
        device = rows.one_B.device
        self._n_B = torch.tensor(layout.lengths, device=device)
        self._count_B = torch.minimum(rows.fixed_B, self._n_B)
        self._after: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store a layer's entries of the prompts, or record those of later tokens (`AttentionObserver`)."""
        if layer in self.seen:
            self._after[layer] = (k_BGTD, v_BGTD)
            return
        self.seen.add(layer)
        self.rows.read(layer, k_BGTD, v_BGTD, self.choice(layer, q_BHTD, k_BGTD), self._count_B)

    def finish(self, n_B: Tensor) -> None:
        """Store the newest of the tokens after the prompts; sequences are now `n_B` long."""
        if not self._after:
            return
        k_LBGTD, v_LBGTD = _stacked(self._after)
        step_T = torch.arange(k_LBGTD.shape[3], device=n_B.device)
        pos_BT = self._n_B[:, None] + step_T
        near_BT = pos_BT >= (n_B - self.rows.newest_B)[:, None]
        self.rows.take(k_LBGTD, v_LBGTD, pos_BT, near_BT & (pos_BT < n_B[:, None]))


def _stacked(by_layer: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack keys and values of all layers, each to one tensor."""
    keys, values = zip(*(by_layer[layer] for layer in sorted(by_layer)), strict=True)
    return torch.stack(keys), torch.stack(values)
