"""Rules that score a layer's KV entries within the layer: bounds, positions, chance, and attention itself.

Shapes: B batch, T tokens of a step, S cache positions, H query heads, G KV heads, D head dim, P pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.entry_sets import ReadBudget
from longtrain.decoding.retrieval.scores import head_weights
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.sampling import HashRng
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.decoding.roles import TokenTree, Verdict
    from longtrain.methods.sparse.config import Config
    from longtrain.targets.model import Target

ALWAYS = torch.finfo(torch.float32).max
"""Score of an entry that is read before all others."""


class LayerRule(Selector):
    """Base of rules that select in each layer by its own query of the root.

    Args:
        budget: see `Selector`.
        config: the rule's options.
        target: the target that the entries belong to.
    """

    def __init__(self, budget: ReadBudget, config: Config, target: Target) -> None:
        super().__init__(budget)
        self.config, self.target = config, target
        self.name = f"sparse {config.rule}"

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Start with new prompts (see `Selector`)."""
        super().start(tokens_BS, n_B, step, cache)
        self.prompt_B = n_B.clone()

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return the rule's scores (see `Selector`); with `prompt_only`, generated tokens are always read."""
        scores_BGS = self.scores(layer, q_BHTD[:, :, 0], k_BGSD, len_B)
        if not self.config.prompt_only:
            return scores_BGS
        new_BS = torch.arange(k_BGSD.shape[2], device=len_B.device) >= self.prompt_B[:, None]
        return scores_BGS.masked_fill(new_BS[:, None], ALWAYS)

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return scores_BGS from the root's query; see `at_layer`."""
        raise NotImplementedError


class WindowRule(LayerRule):
    """The sinks and the last tokens of the text. Source: StreamingLLM (arXiv 2309.17453) §3.2."""

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return an entry's position as its score."""
        return slots_of(k_BGSD)


class RandomRule(LayerRule):
    """Random entries at each choice, drawn independently for each layer and KV head."""

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return random numbers that depend on the choice's position, the entry's, the layer and the head."""
        _B, G, S, _ = k_BGSD.shape
        rng = HashRng(self.config.seed, len_B[:, None])
        slot_1S = torch.arange(S, device=len_B.device)[None]
        return torch.stack([rng.uniform(slot_1S, f"rows {layer} {head}") for head in range(G)], 1).float()


class QuestRule(LayerRule):
    """Pages by an upper bound of what the query can score in them.

    Source: Quest (arXiv 2406.10774) Algorithm 1.
    Note: a page's score is the mean bound of the query heads of a KV head (the paper has MHA), which recalls
        more than the maximum; SGLang averages their queries and gives all KV heads one set, and
        sparse-attention-hub chooses for each query head (tests/interop/test_quest.py compares). The paper
        leaves the first two layers dense: `select.dense_layers=[0,1]`. The last page that is read may be read
        in part.
    """

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return for each entry its page's bound."""
        bound_BHP = page_bounds(q_BHD, k_BGSD, len_B, self.config.page)
        mean_BGP = bound_BHP.unflatten(1, (k_BGSD.shape[1], -1)).mean(2)
        return mean_BGP.repeat_interleave(self.config.page, -1)[..., : k_BGSD.shape[2]]


class OracleRule(LayerRule):
    """The entries that the root attends to most in each layer and KV head: the upper bound."""

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return the attention summed over a KV head's query heads."""
        return attention(self.target, layer, q_BHD, k_BGSD, len_B)


class PreviousRule(LayerRule):
    """The entries that the previous token attended to most in each layer and KV head.

    The first choice has no previous token and takes the last entries.
    """

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Start with new prompts (see `Selector`)."""
        super().start(tokens_BS, n_B, step, cache)
        self._now: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return the scores and record this step's queries (see `Selector`)."""
        self._now[layer] = q_BHTD
        return self.scores(layer, q_BHTD[:, :, 0], k_BGSD, len_B)

    def scores(self, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return the attention of the query that was committed last."""
        if layer not in self._last:
            return slots_of(k_BGSD)
        return attention(self.target, layer, self._last[layer], k_BGSD, len_B)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Keep the queries of the last accepted node."""
        row_B = torch.arange(len(verdict.n_B), device=verdict.n_B.device)
        node_B = verdict.path_BP[row_B, (verdict.n_B - 1).clamp(min=0)]
        self._last = {layer: q_BHTD[row_B, :, node_B] for layer, q_BHTD in self._now.items()}

    def bytes(self) -> int:
        """Return the bytes of the queries of this step and of the previous token."""
        return sum(q.nbytes for q in (*self._now.values(), *self._last.values()))


class ReusedRule(PreviousRule):
    """All layers read what one layer attends to.

    Source: TidalDecode (arXiv 2410.05076) §3.
    Note: the paper leaves the layers before the chosen one dense and chooses anew at a second layer. Here the
        layers before it read what it attended to at the previous token, and the chosen layer itself is not
        dense either; `select.dense_layers` makes layers dense.
    """

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Start with new prompts (see `Selector`)."""
        super().start(tokens_BS, n_B, step, cache)
        self._scores_BGS: Tensor | None = None

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return the chosen layer's attention; before that layer, that of the previous token."""
        assert self.cache is not None
        chosen = self.config.layer
        if layer == chosen:
            self._now[chosen] = q_BHTD
            self._scores_BGS = attention(self.target, layer, q_BHTD[:, :, 0], k_BGSD, len_B)
        elif layer == 0:
            self._scores_BGS = self.scores(chosen, q_BHTD[:, :, 0], self.cache.keys(chosen), len_B)
        assert self._scores_BGS is not None
        return self._scores_BGS


def slots_of(k_BGSD: Tensor) -> Tensor:
    """Return each entry's position as its score, fp32_BGS: exact below 2^24."""
    return torch.arange(k_BGSD.shape[2], device=k_BGSD.device).float().expand(k_BGSD.shape[:3])


def attention(target: Target, layer: int, q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
    """Return a layer's attention weights of committed entries, summed over a KV head's heads, [B, G, S]."""
    visible_BS = torch.arange(k_BGSD.shape[2], device=len_B.device) < len_B[:, None]
    scale, sinks_H = target.scaling(layer), target.sinks(layer)
    weights_BHS = head_weights(q_BHD, k_BGSD, visible_BS, scale=scale, sinks_H=sinks_H)
    return weights_BHS.unflatten(1, (k_BGSD.shape[1], -1)).sum(2)


def page_bounds(q_BHD: Tensor, k_BGSD: Tensor, len_B: Tensor, page: int) -> Tensor:
    """Return the upper bound of a query's score with a key of each page, [B, H, P] in fp32 or wider.

    Args:
        q_BHD: one query a head.
        k_BGSD: keys, of which the first `len_B` count; a page without any has bound 0.
        len_B: number of committed tokens.
        page: tokens of a page; the last may have fewer.
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
    # per channel the larger of q * high and q * low, summed: [B, G, H / G, P]
    bound = q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)
    return bound.flatten(1, 2)
