"""The draft at work: no prefill, constant memory, trees by dynamic beam or by sampling.

Shapes: B batch, S prompt tokens, W window, J levels, M nodes of one level, N nodes so far, P path,
E hidden dim, H query heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, PrefixOnly
from longtrain.decoding.roles import Law, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Coins, Sampling, probs
from longtrain.decoding.tree import depths
from longtrain.errors import ConfigError, ConflictError
from longtrain.layers import Rope
from longtrain.methods.longspec.ring import Ring
from longtrain.target.step import TargetStep, Want

if TYPE_CHECKING:
    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.modules import LongSpecDraft
    from longtrain.target.model import Target


class LongSpecRuntime:
    """Proposes trees with a LongSpec draft (`decoding.roles.Draft`).

    Its only state is the ring. Keys and values of a token depend on that token and its position alone, so a
    prompt costs the draft its last W tokens, and a rejected branch costs nothing to forget.

    Args:
        draft: the module, in the target's dtype and on its device.
        target: shares embedding, rotary and head.
        config: hyperparameters.

    Source: LongSpec §3.1 (constant memory), §3.3 and the authors' code (tree by dynamic beam).
    Note: a node at depth t needs the shift t + 1. Levels beyond `config.max_depth` work, but untrained.
    """

    want = Want()
    offers = ((1, 1), (1, 1, 1, 1), (2, 4, 4), (4, 8, 8, 8), (4, 16, 16, 16, 16))

    def __init__(self, draft: LongSpecDraft, target: Target, config: Config) -> None:
        self.draft, self.target, self.window = draft, target, config.window
        self.kv_layer = config.kv_source_layer % target.info.n_layers
        self.ring: Ring | None = None
        self.cache: KVCache | None = None
        self._depths: dict[TreeShape, Tensor] = {}

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Take the last W tokens of each prompt into the ring; nothing else of the prompt is looked at."""
        self.cache = cache
        B, S = tokens_BS.shape
        pos_BP = n_B[:, None] - min(self.window, S) + torch.arange(min(self.window, S), device=n_B.device)
        info = self.target.info
        like_GD = torch.empty(
            info.n_kv_heads, info.head_dim, dtype=self.target.dtype, device=self.target.device
        )
        if self.ring is not None and self.ring.serves(B, like_GD):
            self.ring.clear()
        else:
            self.ring = Ring(B, self.window, like_GD)
        self._take(tokens_BS.gather(1, pos_BP.clamp(min=0)), pos_BP, pos_BP >= 0)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, coins: Coins) -> TokenTree:
        """Draft level by level below the root.

        POINT: the best `width` children by cumulative log-probability over all nodes of the level above,
        whoever their parents are. IID: children are dealt to the parents evenly, before they are drawn.

        Raises:
            ConfigError: a tree deeper than the window, or a law this draft does not have.
            ConflictError: called before `start`.
        """
        ring, cache = self._state(shape)
        if shape not in self._depths:
            self._depths[shape] = depths(shape, root_B.device)
        B, N = len(root_B), shape.n_nodes
        tokens_BN = root_B[:, None].expand(B, N).clone()
        parents_BN = torch.full_like(tokens_BN, -1)
        sees_BNN = torch.eye(N, dtype=torch.bool, device=root_B.device).repeat(B, 1, 1)
        score_BM = torch.zeros(B, 1, device=root_B.device)
        laws: list[Tensor] = []
        first, last = 0, 1
        pos_BJ = cache.len_B[:, None] + torch.arange(shape.depth, device=root_B.device)
        cos_BJD, sin_BJD = self.target.rope(pos_BJ)
        for depth, width in enumerate(shape.widths):
            level, at = slice(first, last), slice(depth, depth + 1)
            rope = cos_BJD[:, at], sin_BJD[:, at]
            logits_BMV = self._level(
                ring, cache, tokens_BN[:, level], pos_BJ[:, at], rope, sees_BNN[:, level, :last]
            )
            child = slice(last, last + width)
            if shape.law is Law.POINT:
                tokens, parents, score_BM = _best(logits_BMV, score_BM, width, sampling)
            else:
                q_BMV = probs(logits_BMV, sampling)
                laws.append(q_BMV)
                tokens, parents = _sampled(q_BMV, width, cache.len_B + depth + 1, coins)
            tokens_BN[:, child], parents_BN[:, child] = tokens, parents + first
            above_BMN = sees_BNN.gather(1, (parents + first)[..., None].expand(-1, -1, N))
            sees_BNN[:, child] |= above_BMN
            first, last = last, last + width
        q_BNV = None
        if laws:
            q_BNV = torch.cat((*laws, torch.zeros_like(laws[0][:, :1]).expand(-1, N - first, -1)), dim=1)
        return TokenTree(tokens_BN, parents_BN, self._depths[shape], shape.law, q_BNV)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Keys and values of the accepted tokens go into the ring; those of the tree are forgotten."""
        cache = self.cache
        if cache is None:
            raise ConflictError(
                "a LongSpec draft observed a step before start(); run it through Engine.generate"
            )
        path_BP, n_B = verdict.path_BP, verdict.n_B
        step_P = torch.arange(path_BP.shape[1], device=n_B.device)
        pos_BP = (cache.len_B - n_B)[:, None] + step_P
        self._take(tree.tokens_BN.gather(1, path_BP), pos_BP, step_P < n_B[:, None])

    def bytes(self) -> int:
        """Bytes of the ring: a function of batch, window and tree, not of the context."""
        return 0 if self.ring is None else self.ring.bytes()

    def tensors(self) -> tuple[Tensor, ...]:
        """The ring's buffers."""
        ring = self.ring
        return () if ring is None else (ring.k_BGSD, ring.v_BGSD, ring.pos_BS)

    def _state(self, shape: TreeShape) -> tuple[Ring, KVCache]:
        """The ring with room for this tree, and the cache."""
        if self.ring is None or self.cache is None:
            raise ConflictError("a LongSpec draft was asked before start(); run it through Engine.generate")
        if shape.law is Law.NO_REPLACE:
            raise ConfigError("LongSpec drafts by law 'point' (beam) or 'iid' (sampled), not 'no_replace'")
        if shape.depth >= self.window:
            raise ConfigError(
                f"a tree of depth {shape.depth} does not fit a window of {self.window}; "
                f"allowed: up to {self.window - 1} levels"
            )
        self.ring.reserve(shape.n_nodes)
        return self.ring, self.cache

    def _take(self, tokens_BP: Tensor, pos_BP: Tensor, valid_BP: Tensor) -> None:
        """Compute and store keys and values of tokens; no attention is run for them."""
        assert self.ring is not None
        rope = self.target.rope(pos_BP.clamp(min=0))
        normed_BPE = self.draft.input_layernorm(self.target.embed(tokens_BP))
        self.ring.put(pos_BP, valid_BP, *self.draft.self_attn.keys_values(normed_BPE, rope))

    def _level(
        self, ring: Ring, cache: KVCache, tokens_BM: Tensor, pos_B1: Tensor, rope: Rope, sees_BMN: Tensor
    ) -> Tensor:
        """Logits_BMV of one level's nodes, the last of N so far; their keys and values join the tree's."""
        draft, embed_BME = self.draft, self.target.embed(tokens_BM)
        normed_BME = draft.input_layernorm(embed_BME)
        first = sees_BMN.shape[-1] - sees_BMN.shape[1]
        ring.put_nodes(first, *draft.self_attn.keys_values(normed_BME, rope))
        query_BMHD = draft.self_attn.query(normed_BME, rope)
        mixed_BMHD = ring.attend(query_BMHD, pos_B1, sees_BMN, scale=draft.scale)

        def read(q_BMHD: Tensor) -> Tensor:
            out, _ = cache.attend(self.kv_layer, q_BMHD.transpose(1, 2), mask=PrefixOnly(), scale=draft.scale)
            return out.transpose(1, 2)

        return self.target.head(draft.after_own(embed_BME, mixed_BMHD, rope, read))


def _best(
    logits_BMV: Tensor, score_BM: Tensor, width: int, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` most likely continuations of all nodes together: tokens, parents within the level, scores.

    Under temperature the target draws from a sharper or flatter law, and so are continuations ranked. A
    single continuation of a single node is its argmax, whatever the scores.
    """
    if width == logits_BMV.shape[1] == 1:
        best_BK = logits_BMV.argmax(-1)
        return best_BK, torch.zeros_like(best_BK), score_BM
    wide = torch.promote_types(logits_BMV.dtype, torch.float32)
    logp_BMV = (logits_BMV.to(wide) / (sampling.temperature or 1.0)).log_softmax(-1)
    vocab = logp_BMV.shape[-1]
    # Only a node's own best `width` can be among the best of all.
    few_BMK, token_BMK = logp_BMV.topk(min(width, vocab), dim=-1)
    total_BX = (score_BM[..., None].to(wide) + few_BMK).flatten(1)
    if total_BX.shape[1] < width:
        raise ConfigError(
            f"a tree level of {width} nodes; a vocabulary of {vocab} allows {total_BX.shape[1]} here"
        )
    best_BK, at_BK = total_BX.topk(width, dim=-1)
    return token_BMK.flatten(1).gather(1, at_BK), at_BK // few_BMK.shape[-1], best_BK


def _sampled(q_BMV: Tensor, width: int, pos_B: Tensor, coins: Coins) -> tuple[Tensor, Tensor]:
    """`width` independent draws, dealt evenly to the parents; each has a coin of its own."""
    above = q_BMV.shape[1]
    parents = [child * above // width for child in range(width)]
    drawn = [coins.draw(q_BMV[:, m], pos_B, f"draft{i}" if i else "draft") for i, m in enumerate(parents)]
    tokens_BK = torch.stack(drawn, dim=1)
    return tokens_BK, (torch.arange(width, device=pos_B.device) * above // width).expand_as(tokens_BK)
