"""ShadowKV's selection: a chunk of keys is scored by its mean; chunks with outliers are always read.

Shapes: B batch, S cache positions, C chunks, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from longtrain.decoding.retrieval.scores import group_scores, head_weights
from longtrain.methods.sparse.rules import ALWAYS, LayerRule
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache


class LandmarkRule(LayerRule):
    """Chunks by the attention to their landmarks; tokens of an incomplete chunk are read first.

    Source: ShadowKV (arXiv 2410.21465) §3.2, §4.1, Algorithms 1 and 2.
    Note: outliers are a share of the prompt's chunks (the paper: 48 chunks of about 16 thousand), and count
        in the budget. Chunks of generated tokens get landmarks too, unless `prompt_only`: the paper reads all
        of these. Keys are exact: the paper's low-rank keys concern storage, not selection. A landmark stands
        for each key of its chunk, so a target's attention sink counts against as many scores.
    """

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Start with new prompts (see `Selector`)."""
        super().start(tokens_BS, n_B, step, cache)
        self._outliers: dict[int, Tensor] = {}

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return for each entry its chunk's share of the attention to landmarks."""
        (B, G, S), size = k_BGSD.shape[:3], self.config.chunk
        full_BC = torch.arange(S // size, device=len_B.device) < (len_B // size)[:, None]
        if layer not in self._outliers:
            self._outliers[layer] = outliers(k_BGSD, self.prompt_B, size, self.config.outliers)
        scores_BGS = torch.full((B, G, S), ALWAYS, device=k_BGSD.device)
        if full_BC.shape[1]:
            scale, sinks_H = self.target.scaling(layer), self.target.sinks(layer)
            if sinks_H is not None:
                wide = torch.promote_types(sinks_H.dtype, torch.float32)
                sinks_H = sinks_H.to(wide) - math.log(size)
            k_BGCD = landmarks(k_BGSD, size)
            weights_BHC = head_weights(q_BHD, k_BGCD, full_BC, scale=scale, sinks_H=sinks_H)
            best_BGC = group_scores(weights_BHC, G).float().masked_fill(~full_BC[:, None], ALWAYS)
            special_BGC = self._outliers[layer]
            best_BGC[..., : special_BGC.shape[-1]].masked_fill_(special_BGC, ALWAYS)
            scores_BGS[..., : full_BC.shape[1] * size] = best_BGC.repeat_interleave(size, -1)
        return scores_BGS

    def bytes(self) -> int:
        """Return the bytes of the outlier masks; landmarks are computed at each step."""
        return sum(found.nbytes for found in self._outliers.values())


def landmarks(k_BGSD: Tensor, size: int) -> Tensor:
    """Return the means of whole chunks of keys, [B, G, C, D] in fp32 or wider."""
    count = k_BGSD.shape[2] // size
    wide = torch.promote_types(k_BGSD.dtype, torch.float32)
    return k_BGSD[:, :, : count * size].to(wide).unflatten(2, (count, size)).mean(3)


def outliers(k_BGSD: Tensor, prompt_B: Tensor, size: int, share: float) -> Tensor:
    """Return the chunks of the prompts with the keys least similar to their landmark, bool_BGC.

    Args:
        k_BGSD: keys.
        prompt_B: tokens of each prompt; incomplete chunks do not count.
        size: tokens of a chunk.
        share: share of a prompt's chunks, rounded to whole ones.
    """
    C, wide = k_BGSD.shape[2] // size, torch.promote_types(k_BGSD.dtype, torch.float32)
    k = k_BGSD[:, :, : C * size].to(wide).unflatten(2, (C, size))
    worst_BGC = cosine_similarity(k, k.mean(3, keepdim=True), dim=-1).amin(-1)
    chunks_B = prompt_B // size
    beyond_BC = torch.arange(C, device=prompt_B.device) >= chunks_B[:, None]
    rank_BGC = worst_BGC.masked_fill(beyond_BC[:, None], torch.inf).argsort(-1).argsort(-1)
    return rank_BGC < (chunks_B * share).round()[:, None, None]
