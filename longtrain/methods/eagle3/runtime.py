"""The EAGLE-3 draft at inference: its KV cache is made of the target's features, trees of its own.

With n tokens committed and the root after them, the draft has stored positions 0..n-2; position n-1 (feature
of token n-1, embedding of the root) is the tree's root node. A node below takes its parent's output as its
feature.

Shapes: B batch, S prompt tokens, J levels, M nodes of one level, N nodes, P path, E hidden dim, G KV heads,
D head dim, K tokens of the draft's vocabulary, V of the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.history import DraftHistory
from longtrain.cache.ring import DraftRing
from longtrain.decoding.expansion import DraftVocabulary, Level, TreeExpansion, check_tree
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.kernels.fused_layer import RowPositions
from longtrain.methods.eagle3.fused import FusedEagle3
from longtrain.methods.rope import ModuleRope
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.layers import Rope
    from longtrain.methods.eagle3.config import Config
    from longtrain.methods.eagle3.modules import Eagle3Draft
    from longtrain.targets.model import Target

CHUNK = 4096
"""Prompt tokens computed at once: their features before `fc` are several times as large as a hidden state."""


class Eagle3Runtime:
    """Proposes trees with an EAGLE-3 draft (`decoding.roles.Draft`).

    Its state is its own keys and values, at every position or in a ring buffer with sinks, and the feature of
    the last committed token. All are updated in place. Keys computed from the draft's own features are
    discarded after verification; accepted tokens are stored again with the target's features.

    Args:
        draft: the module, in the target's dtype and on its device.
        target: provides hidden states, and embeddings and rotary if the draft has none of its own.
        config: hyperparameters.

    Source: EAGLE-3 §3.1; the authors' code (`topK_genrate`, `stable_kv`).
    Note: a level's nodes are the most probable continuations of all nodes of the level above together, and
        all of them are verified. Levels beyond `config.depths` work, but untrained.
    """

    offers = ((1, 1), (1, 1, 1, 1), (2, 4, 4), (4, 8, 8, 8), (4, 16, 16, 16, 16))

    def __init__(self, draft: Eagle3Draft, target: Target, config: Config) -> None:
        self.draft, self.target, self.config = draft, target, config
        self.outputs = OutputRequest(hidden=draft.layers)
        self.layer = FusedEagle3(draft)
        self._rope = ModuleRope(config, target)
        size, part = target.info.vocab_size, len(draft.draft_ids_K)
        self._expansion = TreeExpansion(DraftVocabulary(draft.draft_ids_K, size) if part < size else None)
        self.rows: DraftRing | DraftHistory | None = None
        self.cache: KVCache | None = None
        self._feature_BE: Tensor | None = None

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Store keys and values of the prompts; with a window, only of the sinks and the last tokens."""
        self.cache = cache
        if self.layer.holds():
            self.layer.renew()
        else:
            self.layer = FusedEagle3(self.draft)
        S, count_B = tokens_BS.shape[1], n_B - 1
        rows = self.rows = self._storage(tokens_BS, cache)
        # A prompt of n tokens has n - 1 positions whose next token is known.
        none_B = torch.zeros_like(n_B)
        if isinstance(rows, DraftRing):
            since_B = (count_B - rows.window).clamp(min=0)
            rows.begin(since_B)
            self._read(tokens_BS, step, none_B, min(rows.sinks, S), count_B)
            self._read(tokens_BS, step, since_B, min(rows.window, S), count_B)
        else:
            self._read(tokens_BS, step, none_B, S, count_B)
        last_BE = self._features(step, count_B[:, None])[:, 0]
        if self._feature_BE is None or self._feature_BE.shape != last_BE.shape:
            self._feature_BE = torch.empty_like(last_BE)
        self._feature_BE.copy_(last_BE)

    def reserve(self, nodes: int) -> None:
        """Make room for trees of this many nodes (`decoding.roles.Draft`)."""
        assert self.rows is not None
        self.rows.reserve(nodes)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft level by level below the root (`TreeExpansion`)."""
        rows, cache, feature_BE = self._state()
        self.check_shape(shape)
        rows.reserve(shape.n_expanded)
        held_B = cache.len_B - 1
        above_BME = feature_BE[:, None]

        def logits_of(level: Level) -> Tensor:
            nonlocal above_BME
            logits_BMK, above_BME = self._level(rows, held_B, level, level.of_parents(above_BME))
            return logits_BMK

        return self._expansion.grow(logits_of, root_B, cache.len_B, shape, sampling, rng)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Store the accepted nodes with the target's features, in place of the tree's own keys and values."""
        _, cache, before_BE = self._state()
        path_BP, n_B = verdict.path_BP, verdict.n_B
        one_a_depth = path_BP.shape[1] == tree.tokens_BN.shape[1] and tree.depth_N.dim() == 1
        feature_BPE = self._features(step, None if one_a_depth else path_BP)  # a chain's nodes are in order
        whole_BXE = torch.cat((before_BE[:, None], feature_BPE), dim=1)  # [B, 1 + P, E]
        self._take(tree.tokens_BN, path_BP, whole_BXE[:, :-1], verdict.root_pos(cache.len_B) - 1, n_B)
        last_B1E = n_B[:, None, None].expand(-1, 1, before_BE.shape[-1])
        torch.gather(whole_BXE, 1, last_B1E, out=before_BE[:, None])  # 0 accepted: unchanged

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that this draft does not support (`decoding.roles.Draft`)."""
        check_tree(shape, len(self.draft.draft_ids_K), "EAGLE-3", self.config.window)

    def bytes(self) -> int:
        """Return the bytes of its keys and values, and of one feature a sequence."""
        held = 0 if self._feature_BE is None else self._feature_BE.nbytes
        return held + (0 if self.rows is None else self.rows.bytes())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return its keys and values, the last features, and one tensor of the concatenated weights."""
        if self.rows is None or self._feature_BE is None:
            return ()
        return (*self.rows.tensors(), self._feature_BE, self.layer.qkv.weight)

    def _state(self) -> tuple[DraftRing | DraftHistory, KVCache, Tensor]:
        assert self.rows is not None and self.cache is not None and self._feature_BE is not None
        return self.rows, self.cache, self._feature_BE

    def _storage(self, tokens_BS: Tensor, cache: KVCache) -> DraftRing | DraftHistory:
        """Allocate the KV storage. Reuses that of an earlier call if it fits."""
        (B, S), kept = tokens_BS.shape, self.rows
        like_GD = torch.empty(
            self.layer.heads[1], self.layer.dim, dtype=self.target.dtype, device=self.target.device
        )
        if self.config.window:
            if isinstance(kept, DraftRing) and kept.serves(B, like_GD):
                return kept
            return DraftRing(B, self.config.window, like_GD, sinks=self.config.sinks)
        left = cache.room_left()
        positions = self.target.info.max_positions if left is None else S + left
        if isinstance(kept, DraftHistory) and kept.serves(B, positions, like_GD):
            return kept
        self.rows = kept = None  # frees the old storage before allocating
        return DraftHistory(B, positions, like_GD)

    def _read(self, tokens_BS: Tensor, step: TargetStep, first_B: Tensor, length: int, end_B: Tensor) -> None:
        """Store `length` prompt positions from `first_B` on, but none from `end_B` on."""
        B, S = tokens_BS.shape
        size = max(1, CHUNK // B)
        for start in range(0, length, size):
            from_B = first_B + start
            pos_BP = from_B[:, None] + torch.arange(min(size, length - start), device=from_B.device)
            count_B = (end_B - from_B).clamp(min=0, max=pos_BP.shape[1])
            next_BP, features = (pos_BP + 1).clamp(max=S - 1), self._features(step, pos_BP.clamp(max=S - 1))
            self._take(tokens_BS, next_BP, features, from_B, count_B)

    def _features(self, step: TargetStep, at_BP: Tensor | None) -> Tensor:
        """Return the features [B, P, E] of the given positions of a step, or of all."""
        states = [step.hidden[layer] for layer in self.draft.layers]
        if at_BP is not None:
            states = [state.gather(1, at_BP[..., None].expand(-1, -1, state.shape[-1])) for state in states]
        return self.layer.feature([state.flatten(0, 1) for state in states]).unflatten(0, states[0].shape[:2])

    def _take(
        self, ids_BS: Tensor, next_BP: Tensor, feature_BPE: Tensor, first_B: Tensor, count_B: Tensor
    ) -> None:
        """Store keys and values of the first `count_B` positions, without computing their attention.

        Args:
            ids_BS: tokens.
            next_BP: index into `ids_BS` of the token after each position.
            feature_BPE: feature of each position.
            first_B: the first position.
            count_B: number of positions to store.
        """
        assert self.rows is not None
        at = RowPositions.after(first_B, next_BP.shape[1], steps=True)
        entry, _, rope = self._enter(ids_BS, feature_BPE, at, next_BP)
        self.layer.keep(entry, rope, self.rows.positions(first_B, count_B))

    def _enter(
        self, ids_BT: Tensor, feature_BTE: Tensor, at: RowPositions, path_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Rope]:
        """Apply `FusedEagle3.enter` with the draft's embeddings or the target's."""
        own, feature_NE = self.draft.embed_tokens, feature_BTE.flatten(0, 1)
        table_VE, scale = (
            (self.target.embed_weight, self.target.embed_scale) if own is None else (own.weight, 1.0)
        )
        rotation = self._rope.rotation
        return self.layer.enter(ids_BT, table_VE, feature_NE, at, rotation, path_BT, embed_scale=scale)

    def _level(
        self, rows: DraftRing | DraftHistory, held_B: Tensor, level: Level, feature_BME: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits_BMK of one level's nodes and their children's features; store the nodes' keys."""
        B, M = level.tokens_BM.shape
        at = RowPositions.after(held_B, M, ahead=level.depth)
        entry, residual_NE, rope = self._enter(level.tokens_BM, feature_BME, at)
        q_NHD = self.layer.query(entry, rope, rows.tree(level.first, held_B))
        mixed_BMHD = rows.attend(
            q_NHD.unflatten(0, (B, M)), held_B, level.sees_BMN, ahead=level.depth, scale=self.draft.scale
        )
        out_NE, next_NE = self.layer.after_attention(residual_NE, mixed_BMHD.reshape(B * M, -1))
        return self.layer.head(out_NE).unflatten(0, (B, M)), next_NE.unflatten(0, (B, M))
