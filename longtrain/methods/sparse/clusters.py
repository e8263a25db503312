"""ClusterKV's selection: keys of similar direction form clusters, which are selected by their centroids.

Shapes: B batch, S cache positions, N entries to be clustered, C clusters, H query heads, G KV heads, D head
dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from longtrain.methods.sparse.rules import ALWAYS, LayerRule
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache


class ClusterRule(LayerRule):
    """Entries in the order of their clusters' scores; the last cluster is read in part.

    The prompt's entries are clustered once they are in the cache; generated ones follow `cluster_every` at a
    time, and until then are read before all others, newest first.

    Source: ClusterKV (arXiv 2412.03213) §III.
    Note: `select.sinks` takes the place of the paper's 16 sink tokens. k-means starts from evenly spaced
        entries and not from random ones, so that a text gets the same clusters in any batch. Unclustered
        entries count in the budget. A centroid's score is the mean of the query heads of a KV head (the paper
        has MHA).
    """

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Start with new prompts (see `Selector`)."""
        super().start(tokens_BS, n_B, step, cache)
        self._first = n_B.tolist()
        self._found: dict[int, list[_Clusters]] = {}

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return for each entry the product of the query with its cluster's centroid."""
        B, G, S, D = k_BGSD.shape
        known = self._found.setdefault(layer, [_Clusters(G, D, k_BGSD) for _ in range(B)])
        scores_BGS = torch.full((B, G, S), ALWAYS, device=k_BGSD.device)
        q_BHD = q_BHD.to(torch.promote_types(q_BHD.dtype, torch.float32))
        for b, length in enumerate(len_B.tolist()):
            self._follow(known[b], k_BGSD[b], self._first[b], length)
            one = known[b]
            q_GMD = q_BHD[b].unflatten(0, (G, -1))
            mean_GC = (q_GMD @ one.centroid_GCD.transpose(-1, -2)).mean(1).float()
            done = one.label_GN.shape[1]
            scores_BGS[b, :, :done] = mean_GC.gather(1, one.label_GN)
        return scores_BGS

    def _follow(self, one: _Clusters, k_GSD: Tensor, prompt: int, length: int) -> None:
        """Cluster the entries that are new."""
        asked, stretch = self.config, 0 if self.config.prompt_only else self.config.cluster_every
        if not one.label_GN.shape[1]:
            one.add(k_GSD[:, :prompt], max(1, prompt // asked.cluster_tokens), asked.iterations)
        while stretch and (done := one.label_GN.shape[1]) + stretch <= length:
            one.add(k_GSD[:, done : done + stretch], asked.new_clusters, asked.iterations)

    def bytes(self) -> int:
        """Return the bytes of centroids and labels."""
        return sum(one.bytes() for layer in self._found.values() for one in layer)


class _Clusters:
    """The clusters of a sequence in one layer."""

    def __init__(self, groups: int, head_dim: int, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self.label_GN = torch.zeros(groups, 0, dtype=torch.int64, device=like.device)
        self.centroid_GCD = torch.zeros(groups, 0, head_dim, dtype=wide, device=like.device)

    def add(self, k_GND: Tensor, clusters: int, iterations: int) -> None:
        """Add clusters of further entries, independent of the earlier ones."""
        label_GN, centroid_GCD = k_means(k_GND.to(self.centroid_GCD.dtype), clusters, iterations)
        self.label_GN = torch.cat((self.label_GN, label_GN + self.centroid_GCD.shape[1]), 1)
        self.centroid_GCD = torch.cat((self.centroid_GCD, centroid_GCD), 1)

    def bytes(self) -> int:
        """Return the bytes of centroids and labels."""
        return self.label_GN.nbytes + self.centroid_GCD.nbytes


def k_means(k_GND: Tensor, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Cluster keys by the cosine to their centroids, which are means of whole keys.

    Args:
        k_GND: keys, in fp32 or wider.
        clusters: C, of which at most N are used.
        iterations: most rounds; it ends as soon as no entry changes its cluster.

    Returns:
        label_GN, int64, and centroid_GCD; a cluster that lost all its entries keeps its centroid.

    Source: ClusterKV (arXiv 2412.03213) §III.
    """
    G, N, D = k_GND.shape
    C = min(clusters, N)
    first_C = torch.arange(C, device=k_GND.device) * N // C
    centroid_GCD, unit_GND = k_GND[:, first_C].clone(), normalize(k_GND, dim=-1)
    label_GN = torch.full((G, N), -1, device=k_GND.device)
    for _ in range(iterations):
        near_GN = (unit_GND @ normalize(centroid_GCD, dim=-1).transpose(-1, -2)).argmax(-1)
        if torch.equal(near_GN, label_GN):
            break
        label_GN = near_GN
        sums_GCD = torch.zeros_like(centroid_GCD).scatter_add_(1, near_GN[..., None].expand(-1, -1, D), k_GND)
        count_GC = torch.zeros_like(centroid_GCD[..., 0]).scatter_add_(
            1, near_GN, torch.ones_like(k_GND[..., 0])
        )
        kept = count_GC > 0
        centroid_GCD = torch.where(kept[..., None], sums_GCD / count_GC.clamp(min=1)[..., None], centroid_GCD)
    return label_GN, centroid_GCD
