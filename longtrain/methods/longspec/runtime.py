"""The LongSpec draft at inference: no prefill, constant memory, trees by dynamic beam or by sampling.

Shapes: B batch, S prompt tokens, W window, J levels, M nodes of one level, N nodes so far, P path,
E hidden dim, H query heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, PrefixOnly
from longtrain.cache.ring import DraftRing
from longtrain.decoding.expansion import Level, TreeExpansion, check_tree
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.kernels.fused_layer import RowPositions, enter_rows
from longtrain.kernels.int4_linear import AT_ONCE, GROUPS, Int4Linear, int4_runs_on
from longtrain.methods.longspec.config import source_layer
from longtrain.methods.longspec.fused import FusedDraft
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.layers import Rope
    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.modules import LongSpecDraft
    from longtrain.targets.model import Target


class LongSpecRuntime:
    """Proposes trees with a LongSpec draft (`decoding.roles.Draft`).

    Its only state is a ring buffer of keys and values. These depend on a token and its position alone, so a
    prompt costs the draft only its last W tokens, and a rejected branch needs no rollback.

    Args:
        draft: the module, in the target's dtype and on its device.
        target: shares embedding, rotary and head.
        config: hyperparameters.

    Raises:
        ConfigError: the head should be in 4 bits and its input size is no multiple of a quantisation group.

    Source: LongSpec §3.1 (constant memory), §3.3 and the authors' code (tree by dynamic beam).
    Note: a node at depth t needs the shift t + 1. Levels beyond `config.max_depth` work, but untrained.
    """

    outputs = OutputRequest()
    offers = ((1, 1), (1, 1, 1, 1), (2, 4, 4), (4, 8, 8, 8), (4, 16, 16, 16, 16))
    begins_anew = True

    def __init__(self, draft: LongSpecDraft, target: Target, config: Config) -> None:
        self.draft, self.target, self.window = draft, target, config.window
        self.kv_layer = source_layer(config, target.info)
        self.layer = FusedDraft(draft)
        info, half = target.info, target.dtype in (torch.bfloat16, torch.float16)
        faster = half and info.hidden_size % GROUPS[-1] == 0 and int4_runs_on(target.device)
        copied = config.copies_head(info.vocab_size, faster=faster)
        self._int4 = Int4Linear(target.model.lm_head, GROUPS[0]) if copied else None
        self._always_int4 = config.head_bits == 4
        self.ring: DraftRing | None = None
        self.cache: KVCache | None = None
        self._expansion = TreeExpansion()

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Store the last W tokens of each prompt in the ring buffer; the rest of the prompt is not read."""
        self.cache = cache
        if self.layer.holds():
            self.layer.renew()
        else:
            self.layer = FusedDraft(self.draft)
        B, S = tokens_BS.shape
        info = self.target.info
        like_GD = torch.empty(
            info.n_kv_heads, info.head_dim, dtype=self.target.dtype, device=self.target.device
        )
        if self.ring is None or not self.ring.serves(B, like_GD):
            self.ring = DraftRing(B, self.window, like_GD)
        few = min(self.window, S)
        since_B = (n_B - few).clamp(min=0)
        self.ring.begin(since_B)
        pos_BP = since_B[:, None] + torch.arange(few, device=n_B.device)
        self._take(tokens_BS, pos_BP.clamp(max=S - 1), since_B, n_B - since_B)

    def reserve(self, nodes: int) -> None:
        """Make room for trees of this many nodes (`decoding.roles.Draft`)."""
        assert self.ring is not None
        self.ring.reserve(nodes)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft level by level below the root (`TreeExpansion`)."""
        ring, cache = self._state(shape)

        def logits_of(level: Level) -> Tensor:
            return self._level(ring, cache, level)

        return self._expansion.grow(logits_of, root_B, cache.len_B, shape, sampling, rng)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Store the accepted tokens' keys and values in the ring buffer and discard the tree's."""
        assert self.cache is not None
        self._take(tree.tokens_BN, verdict.path_BP, verdict.root_pos(self.cache.len_B), verdict.n_B)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that this draft does not support (`decoding.roles.Draft`)."""
        check_tree(shape, self.target.info.vocab_size, "LongSpec", self.window)

    def bytes(self) -> int:
        """Return the bytes of the ring buffer and of a 4-bit head; independent of the sequence's length."""
        ring = 0 if self.ring is None else self.ring.bytes()
        return ring + (0 if self._int4 is None else self._int4.bytes())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the ring buffer's tensors, and one tensor of the concatenated weights."""
        ring = self.ring
        return () if ring is None else (*ring.tensors(), self.layer.qkv.weight)

    def _state(self, shape: TreeShape) -> tuple[DraftRing, KVCache]:
        """Return the ring buffer with room for this tree, and the cache."""
        assert self.ring is not None and self.cache is not None
        self.check_shape(shape)
        self.ring.reserve(shape.n_expanded)
        return self.ring, self.cache

    def _take(self, ids_BS: Tensor, path_BP: Tensor, first_B: Tensor, count_B: Tensor) -> None:
        """Store keys and values of the first `count_B` tokens, without computing their attention."""
        assert self.ring is not None
        at = RowPositions.after(first_B, path_BP.shape[1], steps=True)
        _, normed_NE, rope = self._enter(ids_BS, at, path_BP)
        self.layer.keep(normed_NE, rope, self.ring.positions(first_B, count_B))

    def _enter(
        self, ids_BT: Tensor, at: RowPositions, path_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Rope]:
        """Return embeddings, their first norm in the layer, and cos and sin (`enter_rows`)."""
        norm, target = self.draft.input_layernorm, self.target
        table_VE, weight_E = target.embed_weight, norm.weight
        return enter_rows(
            ids_BT,
            table_VE,
            (weight_E, norm.eps),
            at,
            target.rotation,
            path_BT=path_BT,
            embed_scale=target.embed_scale,
        )

    def _level(self, ring: DraftRing, cache: KVCache, level: Level) -> Tensor:
        """Return logits_BMV of one level's nodes, and store the nodes' keys and values."""
        tokens_BM, depth = level.tokens_BM, level.depth
        B, M, scale = *tokens_BM.shape, self.draft.scale
        at = RowPositions.after(cache.len_B, M, ahead=depth)
        embed_NE, normed_NE, rope = self._enter(tokens_BM, at)
        q_NHD = self.layer.query(normed_NE, rope, ring.tree(level.first, cache.len_B))
        mixed_BMHD = ring.attend(
            q_NHD.unflatten(0, (B, M)), cache.len_B, level.sees_BMN, ahead=depth, scale=scale
        )

        def read(q_NHD: Tensor) -> Tensor:
            q_BHMD = q_NHD.unflatten(0, (B, M)).transpose(1, 2)
            out_BHMD, _ = cache.attend(self.kv_layer, q_BHMD, mask=PrefixOnly(), scale=scale)
            return out_BHMD.transpose(1, 2).reshape(B * M, -1)

        hidden_NE = self.layer.after_own(embed_NE, mixed_BMHD.reshape(B * M, -1), rope, read)
        return self._head(hidden_NE).unflatten(0, (B, M))

    def _head(self, hidden_NE: Tensor) -> Tensor:
        """Return logits, from the 4-bit copy of the head if it is configured or faster."""
        faster = len(hidden_NE) <= AT_ONCE and int4_runs_on(hidden_NE.device)
        copy = self._int4 if self._always_int4 or faster else None
        return (copy or self.target.head)(hidden_NE)
