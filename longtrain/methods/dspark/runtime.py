"""The DSpark draft at inference: one pass drafts a block, and a head corrects its logits by the token before.

With n tokens committed and the root after them at position n, every layer has stored keys and values of
positions 0..n-1, or of the last of them, computed from the target's own states. A pass over the root and
masks adds nothing to them: the block's keys are overwritten by the next one's.

Shapes: B batch, S prompt tokens, R rows of a block, K slots, M nodes of one level, P path, E hidden dim, H
query heads, G KV heads, D head dim, X tokens that the draft can propose.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longtrain.cache.history import DraftHistory
from longtrain.cache.ring import DraftRing
from longtrain.decoding.expansion import DraftVocabulary, Level, TreeExpansion, check_tree
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.decoding.tree import visible
from longtrain.errors import ConfigError
from longtrain.kernels.fused_layer import RowPositions, Slots, rotary
from longtrain.methods.dspark.fused import FusedDSpark
from longtrain.methods.dspark.target_keys import TargetKeys
from longtrain.methods.rope import ModuleRope
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.layers import Rope
    from longtrain.methods.dspark.config import Config
    from longtrain.methods.dspark.modules import DSparkDraft
    from longtrain.targets.model import Target

CHUNK = 4096
"""Prompt tokens computed at once: the states that `fc` reads are several times as large as one state."""
SHAPES = ((1, 1), (1, 1, 1, 1), (2, 4, 4), (4, 8, 8, 8), (4, 16, 16, 16, 16))

Stores = list[DraftRing | DraftHistory | TargetKeys]
"""Keys and values of each layer, or those of the target."""


class DSparkRuntime:
    """Proposes chains and trees of up to `block_size` levels (`decoding.roles.Draft`).

    A node at depth k has the logits of slot k, corrected by its own token; so a tree needs no further pass.
    With `min_confidence` trees are cut, and the target runs over the nodes that are left.

    Args:
        draft: the module, in the target's dtype and on its device, with its mask token.
        target: provides hidden states, embeddings, rotary and head.
        config: hyperparameters.

    Source: DSpark §3; the authors' code (`draft_ops`).
    """

    def __init__(self, draft: DSparkDraft, target: Target, config: Config) -> None:
        self.draft, self.target, self.config, self._smooth = draft, target, config, False
        self.outputs = OutputRequest(hidden=draft.read)
        most = config.most_levels
        self.offers = tuple(dict.fromkeys((*(one for one in SHAPES if len(one) <= most), (1,) * most)))
        self.fused = FusedDSpark(draft)
        self.cuts = config.min_confidence > 0
        self._rope = ModuleRope(config, target)
        ids_X, size = draft.draft_ids_K, target.info.vocab_size
        self._expansion = TreeExpansion(None if ids_X is None else DraftVocabulary(ids_X, size))
        self.stores: Stores = []
        self.cache: KVCache | None = None
        self._sees_1RR = torch.ones(1, config.rows, config.rows, dtype=torch.bool, device=target.device)

    def smooth(self) -> DSparkRuntime:
        """Return the draft with laws that rounding changes little (`decoding.roles.Draft`)."""
        other = copy.copy(self)  # of the same weights
        other._smooth = True
        return other

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Store keys and values of the prompts; in layers with a window only of the last tokens."""
        self.cache = cache
        if self.fused.holds():
            self.fused.renew()
        else:
            self.fused = FusedDSpark(self.draft)
        B, S = tokens_BS.shape
        self._allocate(B, S, cache)
        windows = self.config.layer_windows
        for window in dict.fromkeys(windows[i] for i in self.draft.own):
            layers = [i for i in self.draft.own if windows[i] == window]
            since_B, length = torch.zeros_like(n_B), S
            if window is not None:
                since_B, length = (n_B - window).clamp(min=0), min(window, S)
                for store in (self.stores[i] for i in layers):
                    assert isinstance(store, DraftRing)
                    store.begin(since_B)
            size = max(1, CHUNK // B)
            for first in range(0, length, size):
                from_B = since_B + first
                pos_BP = from_B[:, None] + torch.arange(min(size, length - first), device=n_B.device)
                count_B = (n_B - from_B).clamp(min=0, max=pos_BP.shape[1])
                self._keep(step, pos_BP.clamp(max=S - 1), from_B, count_B, layers)

    def reserve(self, nodes: int) -> None:
        """Do nothing: a block's rows have their places from `start` on, whatever tree is drafted."""

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Compute a block, and draft level by level from its logits (`TreeExpansion`)."""
        cache = self.cache
        assert cache is not None
        self.check_shape(shape)
        hidden_BKE = self._block(root_B, cache.len_B)
        base_BJX = self._head(hidden_BKE[:, : shape.depth].contiguous())

        def logits_of(level: Level) -> Tensor:
            base_B1X, head = base_BJX[:, level.depth, None], self.draft.path_head
            if head is not None:
                logits_after = head.smooth if self._smooth else head
                return logits_after(base_B1X, hidden_BKE[:, level.depth, None], level.tokens_BM)
            return base_B1X.expand(-1, level.tokens_BM.shape[1], -1).contiguous()

        tree = self._expansion.grow(logits_of, root_B, cache.len_B, shape, sampling, rng)
        return self._cut(tree, hidden_BKE) if self.cuts else tree

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Store keys and values of the accepted tokens, computed from the target's states."""
        cache, path_BP = self.cache, verdict.path_BP
        assert cache is not None
        one_a_depth = path_BP.shape[1] == tree.tokens_BN.shape[1] and tree.depth_N.dim() == 1
        path = None if one_a_depth else path_BP  # a chain's nodes are in order
        self._keep(step, path, verdict.root_pos(cache.len_B), verdict.n_B, self.draft.own)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that this draft does not support (`decoding.roles.Draft`)."""
        ids_X = self.draft.draft_ids_K
        check_tree(shape, self.target.info.vocab_size if ids_X is None else len(ids_X), "DSpark")
        top = self.config.candidates
        if top and any(width > top * above for above, width in pairwise((1, *shape.widths))):
            raise ConfigError(
                f"a tree of widths {list(shape.widths)} for a DSpark draft of method.selector_top={top}; "
                f"allowed: at most {top} times as many nodes at a level as at the one above"
            )
        windows = [window for window in self.config.layer_windows if window is not None]
        stored = min((window - 1 for window in windows), default=shape.depth)  # of accepted tokens at once
        if len(shape.widths) > self.config.block_size or shape.depth > stored:
            most = min(self.config.block_size, stored)
            raise ConfigError(
                f"a tree of depth {shape.depth} for a DSpark draft of method.block_size="
                f"{self.config.block_size} and method.windows={self.config.windows}; allowed: up to {most} "
                "levels"
            )

    def bytes(self) -> int:
        """Return the bytes of the keys and values of all layers."""
        return sum(store.bytes() for store in self.stores)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return keys and values, and one tensor of the concatenated weights."""
        held = [tensor for store in self.stores for tensor in store.tensors()]
        return (*held, self.fused.layers[0].qkv.weight) if held else ()

    def _cut(self, tree: TokenTree, hidden_BKE: Tensor) -> TokenTree:
        """Leave out nodes that are too unlikely to be reached and accepted (`TokenTree.cut`).

        The confidence of a node is that of its children, whatever these are: it reads the node's own token
        and the slot that predicts the next one. So each token is left out or not before it is drawn, and the
        distribution of the text stays the target's.

        Source: DSpark §3; its appendix A shows why a length must not be chosen by later tokens.
        """
        head, confidence = self.draft.path_head, self.draft.confidence_head
        assert head is not None and confidence is not None
        B, N = tree.tokens_BN.shape
        slot_BN = tree.depth_N.clamp(max=hidden_BKE.shape[1] - 1).expand(B, N)
        hidden_BNE = hidden_BKE.gather(1, slot_BN[..., None].expand(-1, -1, hidden_BKE.shape[-1]))
        logit_BN = confidence(hidden_BNE, head.context(hidden_BNE, tree.tokens_BN))
        wide = torch.promote_types(logit_BN.dtype, torch.float32)
        log_BN = logsigmoid(logit_BN.to(wide))
        product_BN = (visible(tree.parents_BN).to(wide) @ log_BN[..., None])[..., 0].exp()
        above_BN = product_BN.gather(1, tree.parents_BN.clamp(min=0))
        return tree.cut(above_BN >= self.config.min_confidence)

    def _head(self, hidden_BJE: Tensor) -> Tensor:
        """Return the logits of some slots, [B, J, X], by the draft's own LM head or the target's."""
        own = self.fused.head
        if own is None:
            return self.target.head(hidden_BJE)
        return own(hidden_BJE.flatten(0, 1)).unflatten(0, hidden_BJE.shape[:2])

    def _allocate(self, batch: int, prompt: int, cache: KVCache) -> None:
        """Allocate storage for every layer, unless that of an earlier call fits."""
        layer, left = self.fused.layers[0], cache.room_left()
        like_GD = torch.empty(layer.heads[1], layer.dim, dtype=self.target.dtype, device=self.target.device)
        positions = self.target.info.max_positions if left is None else prompt + left
        if not self.stores or not all(
            store.serves(batch, positions, like_GD)
            if isinstance(store, DraftHistory)
            else store.serves(batch, like_GD)
            for store in self.stores
        ):
            self.stores = []  # frees the old storage before allocating
            for number, window in enumerate(self.config.layer_windows):
                if number not in self.draft.own:
                    self.stores.append(TargetKeys(batch, self.target.info.readable_layers[-1], like_GD))
                elif window is None:
                    self.stores.append(DraftHistory(batch, positions, like_GD))
                else:
                    ring = DraftRing(batch, window, like_GD)
                    ring.reserve(self.config.rows)
                    self.stores.append(ring)
        for store in self.stores:
            if isinstance(store, TargetKeys):
                store.cache = cache

    def _keep(
        self,
        step: TargetStep,
        at_BP: Tensor | None,
        first_B: Tensor,
        count_B: Tensor,
        layers: Sequence[int],
    ) -> None:
        """Store keys and values of tokens whose states the target has computed.

        Args:
            step: the target's outputs.
            at_BP: index of each token in the step; None: they are in order.
            first_B: position of the first token.
            count_B: number of tokens to store.
            layers: the layers that store them.
        """
        states = [step.hidden[layer] for layer in self.draft.read]
        if at_BP is not None:
            states = [state.gather(1, at_BP[..., None].expand(-1, -1, state.shape[-1])) for state in states]
        context_NE = self.fused.context([state.flatten(0, 1) for state in states])
        rope = self._angles(RowPositions.after(first_B, states[0].shape[1], steps=True).sum(), context_NE)
        for layer in layers:
            store = self.stores[layer]
            assert not isinstance(store, TargetKeys)
            self.fused.layers[layer].keep(context_NE, rope, store.positions(first_B, count_B))

    def _angles(self, pos_BP: Tensor, like: Tensor) -> Rope:
        """Return cos and sin of positions, each [B * P, D]."""
        rotation = self._rope.rotation
        if callable(rotation):
            cos_BPD, sin_BPD = rotation(pos_BP)
            return cos_BPD.flatten(0, 1), sin_BPD.flatten(0, 1)
        return rotary(pos_BP.reshape(-1), rotation.frequency_F, rotation.scaling, like.dtype)

    def _block(self, root_B: Tensor, len_B: Tensor) -> Tensor:
        """Return the head's input of all slots of the block at the root, [B, K, E]."""
        B, rows = len(root_B), self.config.rows
        ids_BR = torch.cat((root_B[:, None], self.draft.mask_id.expand(B, rows - 1)), dim=1)
        sees_BRR = self._sees_1RR.expand(B, -1, -1)

        def slots(layer: int) -> Slots:
            return self.stores[layer].tree(0, len_B)

        def attend(layer: int, q_BRHD: Tensor) -> Tensor:
            return self.stores[layer].attend(q_BRHD, len_B, sees_BRR, ahead=0, scale=self.draft.scale)

        at = RowPositions.after(len_B, rows, steps=True)
        target, rotation = self.target, self._rope.rotation
        return self.fused.block(
            ids_BR, target.embed_weight, at, rotation, slots, attend, embed_scale=target.embed_scale
        )
