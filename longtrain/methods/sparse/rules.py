"""Rules that score a layer's rows within the layer: bounds, positions, chance, and attention itself.

Shapes: B batch, T rows of a step, S slots, H query heads, G KV heads, D head dim, P pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.row_sets import ReadBudget
from longtrain.decoding.retrieval.scores import head_weights
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.sampling import HashCoins
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.decoding.roles import TokenTree, Verdict
    from longtrain.methods.sparse.config import Config
    from longtrain.targets.model import Target

ALWAYS = torch.finfo(torch.float32).max
"""Score of a row that is read before all others."""


class LayerRule(Selector):
    """A rule that each layer asks with its own root query.

    Args:
        budget: see `Selector`.
        config: the rule's options.
        target: whose rows they are.
    """

    def __init__(self, budget: ReadBudget, config: Config, target: Target) -> None:
        super().__init__(budget)
        self.config, self.target = config, target
        self.name = f"sparse {config.rule}"

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """See `Selector`."""
        super().start(tokens_BS, n_B, step, cache)
        self.prompt_B = n_B.clone()

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """See `Selector`."""
        scores_BGS = self.scores(layer, q_BHTD[:, :, 0], k_BGSD, len_B)
        if not self.config.prompt_only:
            return scores_BGS
        new_BS = torch.arange(k_BGSD.shape[2], device=len_B.device) >= self.prompt_B[:, None]
        return scores_BGS.masked_fill(new_BS[:, None], ALWAYS)

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Scores_BGS from the root's query; see `at_layer`."""
        raise NotImplementedError


class WindowRule(LayerRule):
    """The sinks and the last rows of the text. Source: StreamingLLM (arXiv 2309.17453) §3.2."""

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """A row's slot."""
        return slots_of(k_BGSD)


class RandomRule(LayerRule):
    """Other rows by chance at each choice, those of each layer and KV head drawn by themselves."""

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Coins of the choice's position, the row's, the layer and the head."""
        _B, G, S, _ = k_BGSD.shape
        coins = HashCoins(self.config.seed, len_B[:, None])
        slot_1S = torch.arange(S, device=len_B.device)[None]
        return torch.stack([coins.uniform(slot_1S, f"rows {layer} {head}") for head in range(G)], 1).float()


class QuestRule(LayerRule):
    """Pages by an upper bound of what the query can score in them.

    Source: Quest (arXiv 2406.10774) Algorithm 1.
    Note: a page's score is the mean bound of the query heads of a KV head (the paper has MHA), which recalls
        more than the highest one; SGLang averages their queries and gives all KV heads one set, and
        sparse-attention-hub chooses for each query head (tests/interop/test_quest.py compares). The paper
        leaves the first two layers dense: `select.dense_layers=[0,1]`. The last page that is read may be read
        in part.
    """

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """A page's bound for each of its rows."""
        bound_BHP = page_bounds(q_BHD, k_BGSD, len_B, self.config.page)
        mean_BGP = bound_BHP.unflatten(1, (k_BGSD.shape[1], -1)).mean(2)
        return mean_BGP.repeat_interleave(self.config.page, -1)[..., : k_BGSD.shape[2]]


class OracleRule(LayerRule):
    """The rows that the root attends to most, each layer and KV head its own: the upper bound."""

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Attention of a KV head's query heads together."""
        return attention(q_BHD, k_BGSD, len_B)


class PreviousRule(LayerRule):
    """The rows that the position before attended to most, each layer and KV head its own.

    The first choice has no position before it and takes the last rows.
    """

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """See `Selector`."""
        super().start(tokens_BS, n_B, step, cache)
        self._now: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """See `Selector`."""
        self._now[layer] = q_BHTD
        return self.scores(layer, q_BHTD[:, :, 0], k_BGSD, len_B)

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Attention of the query that was committed last."""
        if layer not in self._last:
            return slots_of(k_BGSD)
        return attention(self._last[layer], k_BGSD, len_B)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Keep the queries of the last accepted node."""
        row_B = torch.arange(len(verdict.n_B), device=verdict.n_B.device)
        node_B = verdict.path_BP[row_B, (verdict.n_B - 1).clamp(min=0)]
        self._last = {layer: q_BHTD[row_B, :, node_B] for layer, q_BHTD in self._now.items()}

    def bytes(self) -> int:
        """Queries of a step and of the position before."""
        return sum(q.nbytes for q in (*self._now.values(), *self._last.values()))


class ReusedRule(PreviousRule):
    """What one layer attends to is read by all layers.

    Source: TidalDecode (arXiv 2410.05076) §3.
    Note: the paper leaves the layers before the chosen one dense and chooses anew at a second layer. Here the
        layers before it read what it attended to at the position before, and the chosen layer itself is not
        dense either; `select.dense_layers` makes layers dense.
    """

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """See `Selector`."""
        super().start(tokens_BS, n_B, step, cache)
        self._scores_BGS: Tensor | None = None

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """See `Selector`."""
        assert self.cache is not None
        chosen = self.config.layer
        if layer == chosen:
            self._now[chosen] = q_BHTD
            self._scores_BGS = attention(q_BHTD[:, :, 0], k_BGSD, len_B)
        elif layer == 0:
            self._scores_BGS = self.scores(chosen, q_BHTD[:, :, 0], self.cache.keys(chosen), len_B)
        assert self._scores_BGS is not None
        return self._scores_BGS


def slots_of(k_BGSD: Tensor) -> Tensor:
    """Each row's slot as its score, fp32_BGS: exact below 2^24 rows."""
    return torch.arange(k_BGSD.shape[2], device=k_BGSD.device).float().expand(k_BGSD.shape[:3])


def attention(q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
    """Attention weights of committed rows, summed over the query heads of each KV head, [B, G, S]."""
    visible_BS = torch.arange(k_BGSD.shape[2], device=len_B.device) < len_B[:, None]
    weights_BHS = head_weights(q_BHD, k_BGSD, visible_BS, scale=q_BHD.shape[-1] ** -0.5)
    return weights_BHS.unflatten(1, (k_BGSD.shape[1], -1)).sum(2)


def page_bounds(q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor, page: int) -> Tensor:
    """The most that a query can score with a key of each page, [B, H, P] in fp32 or wider.

    Args:
        q_BHD: one query a head.
        k_BGSD: keys, of which the first `len_B` count; a page without any has bound 0.
        len_B: committed rows.
        page: rows of a page; the last may have fewer.
    """
    G, S = k_BGSD.shape[1:3]
    wide = torch.promote_types(k_BGSD.dtype, torch.float32)
    counts_BS = torch.arange(S, device=len_B.device) < len_B[:, None]
    pad = (0, 0, 0, -S % page)
    k = torch.nn.functional.pad(k_BGSD.to(wide), pad).unflatten(2, (-1, page))
    counts = torch.nn.functional.pad(counts_BS, pad[2:]).unflatten(1, (-1, page))[:, None, :, :, None]
    some = counts.any(3)
    low = k.masked_fill(~counts, torch.inf).amin(3).where(some, 0)
    high = k.masked_fill(~counts, -torch.inf).amax(3).where(some, 0)
    q = q_BHD.to(wide).unflatten(1, (G, -1))
    bound = q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)
    return bound.flatten(1, 2)
