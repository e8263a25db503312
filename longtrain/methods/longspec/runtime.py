"""The draft at work: no prefill, constant memory, trees by dynamic beam or by sampling.

Shapes: B batch, S prompt tokens, W window, J levels, M nodes of one level, N nodes so far, P path,
E hidden dim, H query heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, PrefixOnly
from longtrain.decoding.roles import Law, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Coins, Sampling, probs
from longtrain.decoding.tree import depths
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.beam import best_continuations
from longtrain.kernels.greedy import argmax_rows
from longtrain.kernels.int4_linear import GROUPS, Int4Linear
from longtrain.methods.longspec.fused import FusedDraft
from longtrain.methods.longspec.ring import Ring
from longtrain.targets.step import TargetStep, Want

if TYPE_CHECKING:
    from longtrain.layers import Rope
    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.modules import LongSpecDraft
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class _Plan:
    """What of a tree does not depend on what is drafted.

    Args:
        depth_N: depth of each node.
        step_J: 0, 1, ... for each level but the last.
        parents_1N: of a chain's nodes; None for other trees.
        sees_1NN: which nodes a chain's nodes see; None for other trees.
    """

    depth_N: Tensor
    step_J: Tensor
    parents_1N: Tensor | None
    sees_1NN: Tensor | None


class LongSpecRuntime:
    """Proposes trees with a LongSpec draft (`decoding.roles.Draft`).

    Its only state is the ring. Keys and values of a token depend on that token and its position alone, so a
    prompt costs the draft its last W tokens, and a rejected branch costs nothing to forget.

    Args:
        draft: the module, in the target's dtype and on its device.
        target: shares embedding, rotary and head.
        config: hyperparameters.

    Raises:
        ConfigError: the head is wanted in 4 bits and its input features fit no group.

    Source: LongSpec §3.1 (constant memory), §3.3 and the authors' code (tree by dynamic beam).
    Note: a node at depth t needs the shift t + 1. Levels beyond `config.max_depth` work, but untrained.
    """

    want = Want()
    offers = ((1, 1), (1, 1, 1, 1), (2, 4, 4), (4, 8, 8, 8), (4, 16, 16, 16, 16))

    def __init__(self, draft: LongSpecDraft, target: Target, config: Config) -> None:
        self.draft, self.target, self.window = draft, target, config.window
        self.kv_layer = config.kv_source_layer % target.info.n_layers
        self.layer = FusedDraft(draft)
        self._int4 = Int4Linear(target.model.lm_head, GROUPS[0]) if config.head_bits == 4 else None
        self._head = self._int4 or target.head
        self.ring: Ring | None = None
        self.cache: KVCache | None = None
        self._plans: dict[TreeShape, _Plan] = {}

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Take the last W tokens of each prompt into the ring; nothing else of the prompt is looked at."""
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
            self.ring = Ring(B, self.window, like_GD)
        few = min(self.window, S)
        since_B = (n_B - few).clamp(min=0)
        self.ring.begin(since_B)
        pos_BP = since_B[:, None] + torch.arange(few, device=n_B.device)
        self._take(tokens_BS.gather(1, pos_BP.clamp(max=S - 1)), pos_BP, n_B - since_B)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, coins: Coins) -> TokenTree:
        """Draft level by level below the root.

        POINT: the best `width` children by cumulative log-probability over all nodes of the level above,
        whoever their parents are. IID: children are dealt to the parents evenly, before they are drawn.

        Raises:
            ConfigError: a tree deeper than the window, or a law this draft does not have.
            ConflictError: called before `start`.
        """
        ring, cache = self._state(shape)
        plan = self._plan(shape, root_B.device)
        rope = self.target.rope(cache.len_B[:, None] + plan.step_J)
        if plan.parents_1N is not None:
            return self._chain(ring, cache, plan, rope, root_B, shape, sampling, coins)
        B, N = len(root_B), shape.n_nodes
        tokens_BN = root_B[:, None].expand(B, N).clone()
        parents_BN = torch.full_like(tokens_BN, -1)
        sees_BNN = torch.eye(N, dtype=torch.bool, device=root_B.device).repeat(B, 1, 1)
        score_BM = torch.zeros(B, 1, device=root_B.device)
        laws: list[Tensor] = []
        first, last = 0, 1
        for depth, width in enumerate(shape.widths):
            level = slice(first, last)
            logits_BMV = self._level(ring, cache, tokens_BN[:, level], depth, rope, sees_BNN[:, level, :last])
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
        return TokenTree(tokens_BN, parents_BN, plan.depth_N, shape.law, _laws(laws, N))

    def _chain(
        self,
        ring: Ring,
        cache: KVCache,
        plan: _Plan,
        rope: Rope,
        root_B: Tensor,
        shape: TreeShape,
        sampling: Sampling,
        coins: Coins,
    ) -> TokenTree:
        """One child a node: who sees whom is known beforehand, and the best child is the argmax."""
        assert plan.sees_1NN is not None and plan.parents_1N is not None
        B, N = len(root_B), shape.n_nodes
        sees_BNN = plan.sees_1NN.expand(B, -1, -1)
        tokens, laws = [root_B], []
        for depth in range(shape.depth):
            seen_B1N = sees_BNN[:, depth : depth + 1, : depth + 1]
            logits_B1V = self._level(ring, cache, tokens[-1][:, None], depth, rope, seen_B1N)
            if shape.law is Law.POINT:
                tokens.append(argmax_rows(logits_B1V)[:, 0])
                continue
            laws.append(probs(logits_B1V, sampling))
            tokens.append(_sampled(laws[-1], 1, cache.len_B + depth + 1, coins)[0][:, 0])
        parents_BN = plan.parents_1N.expand(B, -1)
        return TokenTree(torch.stack(tokens, 1), parents_BN, plan.depth_N, shape.law, _laws(laws, N))

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Keys and values of the accepted tokens go into the ring; those of the tree are forgotten."""
        cache = self.cache
        if cache is None:
            raise ConflictError(
                "a LongSpec draft observed a step before start(); run it through Engine.generate"
            )
        path_BP, n_B = verdict.path_BP, verdict.n_B
        step_P = torch.arange(path_BP.shape[1], device=n_B.device)
        self._take(tree.tokens_BN.gather(1, path_BP), (cache.len_B - n_B)[:, None] + step_P, n_B)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that this draft does not take (`decoding.roles.Draft`).

        Raises:
            ConfigError: another law, deeper than the window, or a level wider than all continuations.
        """
        if shape.law is Law.NO_REPLACE:
            raise ConfigError("LongSpec drafts by law 'point' (beam) or 'iid' (sampled), not 'no_replace'")
        if shape.depth >= self.window:
            raise ConfigError(
                f"a tree of depth {shape.depth} does not fit a window of {self.window}; "
                f"allowed: up to {self.window - 1} levels"
            )
        above, vocab = 1, self.target.info.vocab_size
        for width in shape.widths if shape.law is Law.POINT else ():
            if above * vocab < width:
                raise ConfigError(
                    f"a tree level of {width} nodes; a vocabulary of {vocab} allows {above * vocab} here"
                )
            above = width

    def bytes(self) -> int:
        """Bytes of the ring, and of a copy of the head: they depend on batch, window and tree alone."""
        ring = 0 if self.ring is None else self.ring.bytes()
        return ring + (0 if self._int4 is None else self._int4.bytes())

    def tensors(self) -> tuple[Tensor, ...]:
        """The ring's buffers, and the joined weights by one of them."""
        ring = self.ring
        return () if ring is None else (ring.k_BGSD, ring.v_BGSD, ring.since_B, self.layer.qkv.weight)

    def _state(self, shape: TreeShape) -> tuple[Ring, KVCache]:
        """The ring with room for this tree, and the cache."""
        if self.ring is None or self.cache is None:
            raise ConflictError("a LongSpec draft was asked before start(); run it through Engine.generate")
        self.check_shape(shape)
        self.ring.reserve(shape.n_nodes)
        return self.ring, self.cache

    def _plan(self, shape: TreeShape, device: torch.device) -> _Plan:
        """Made once a shape."""
        if shape not in self._plans:
            N, chain = shape.n_nodes, all(width == 1 for width in shape.widths)
            node_N = torch.arange(N, device=device)
            self._plans[shape] = _Plan(
                depths(shape, device),
                node_N[: shape.depth],
                node_N[None] - 1 if chain else None,
                (node_N <= node_N[:, None])[None] if chain else None,
            )
        return self._plans[shape]

    def _take(self, tokens_BP: Tensor, pos_BP: Tensor, count_B: Tensor) -> None:
        """Compute and store keys and values of the first `count_B` tokens; no attention is run for them."""
        assert self.ring is not None
        cos_BPD, sin_BPD = self.target.rope(pos_BP)
        rope = cos_BPD.flatten(0, 1), sin_BPD.flatten(0, 1)
        embed_NE = self.target.embed(tokens_BP).flatten(0, 1)
        self.layer.keep(embed_NE, rope, self.ring.positions(pos_BP[:, 0], count_B))

    def _level(
        self, ring: Ring, cache: KVCache, tokens_BM: Tensor, depth: int, rope: Rope, sees_BMN: Tensor
    ) -> Tensor:
        """Logits_BMV of one level's nodes, the last of N so far; their keys and values join the tree's."""
        B, M, scale = *tokens_BM.shape, self.draft.scale
        cos_ND, sin_ND = (part[:, depth, None].expand(-1, M, -1).flatten(0, 1) for part in rope)
        embed_NE = self.target.embed(tokens_BM).flatten(0, 1)
        q_NHD = self.layer.own(embed_NE, (cos_ND, sin_ND), ring.tree(sees_BMN.shape[-1] - M))
        mixed_BMHD = ring.attend(q_NHD.unflatten(0, (B, M)), cache.len_B, sees_BMN, ahead=depth, scale=scale)

        def read(q_NHD: Tensor) -> Tensor:
            q_BHMD = q_NHD.unflatten(0, (B, M)).transpose(1, 2)
            out_BHMD, _ = cache.attend(self.kv_layer, q_BHMD, mask=PrefixOnly(), scale=scale)
            return out_BHMD.transpose(1, 2).reshape(B * M, -1)

        hidden_NE = self.layer.after_own(embed_NE, mixed_BMHD.reshape(B * M, -1), (cos_ND, sin_ND), read)
        return self._head(hidden_NE).unflatten(0, (B, M))


def _laws(laws: list[Tensor], nodes: int) -> Tensor | None:
    """The levels' laws one after another, zero for the last level's nodes; None where there are none."""
    if not laws:
        return None
    known_BMV = torch.cat(laws, dim=1)
    return torch.nn.functional.pad(known_BMV, (0, 0, 0, nodes - known_BMV.shape[1]))


def _best(
    logits_BMV: Tensor, score_BM: Tensor, width: int, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` most likely continuations of all nodes together: tokens, parents within the level, scores.

    Under temperature the target draws from a sharper or flatter law, and so are continuations ranked.
    """
    return best_continuations(logits_BMV, score_BM, width, sampling.temperature or 1.0)


def _sampled(q_BMV: Tensor, width: int, pos_B: Tensor, coins: Coins) -> tuple[Tensor, Tensor]:
    """`width` independent draws, dealt evenly to the parents; each has a coin of its own."""
    above = q_BMV.shape[1]
    parents = [child * above // width for child in range(width)]
    drawn = [coins.draw(q_BMV[:, m], pos_B, f"draft{i}" if i else "draft") for i, m in enumerate(parents)]
    tokens_BK = torch.stack(drawn, dim=1)
    return tokens_BK, (torch.arange(width, device=pos_B.device) * above // width).expand_as(tokens_BK)
