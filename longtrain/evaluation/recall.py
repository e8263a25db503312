"""Recall of a selector: the share of the target's attention on the KV entries that the selector chooses.

The target reads a given text token by token with full attention, while the selector chooses as if steps read
only its choice, so that selector input and attention weights are exactly the target's own. Attention mass
far from the query is the meaningful part: most mass lies on the first and the last entries, which any set
has.

Shapes: B prompts of one length, T tokens after them, L layers, H query heads, G KV heads, S KV entries, X
sets, K entries of a set, D head dim.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.entry_sets import EntrySets, ReadBudget, choose_entries
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.appended import given_step
from longtrain.decoding.retrieval.lru import LruBuffer
from longtrain.decoding.retrieval.scores import head_weights
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts
from longtrain.evaluation.perplexity import read_contexts
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target

SINKS, NEAR = 4, 64
"""Entries that do not count as far: the first `SINKS` of the text, and the last `NEAR` before the query."""


@dataclass(frozen=True)
class Sets:
    """The KV entries that one step reads: the indices `idx_BXK`, and all entries from `since_B` on."""

    idx_BXK: Tensor
    since_B: Tensor

    def mask(self, slots: int) -> Tensor:
        """Membership of the first `slots` cache positions in each set, bool_BXS."""
        B, X, _ = self.idx_BXK.shape
        slot_S = torch.arange(slots, device=self.idx_BXK.device)
        mask = torch.zeros(B, X, slots, dtype=torch.bool, device=self.idx_BXK.device)
        mask.scatter_(2, self.idx_BXK.clamp(max=slots - 1), True)
        return mask | (slot_S >= self.since_B[:, None])[:, None]


@torch.no_grad()
def recall(
    target: Target,
    selector: Selector,
    prompts: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
) -> list[dict[str, float]]:
    """Measure the attention of the tokens after each prompt on the KV entries that the selector chooses.

    Args:
        target: the frozen model.
        selector: the selector under test; the target still attends to all entries.
        prompts: token ids, all of the same length.
        given: the tokens after each prompt, all of the same length.

    Returns:
        For each prompt, means over steps, layers and query heads: `total_read`, the chosen share of all mass;
        `far_mass`, the mass outside the first `SINKS` entries and the last `NEAR`; `far_read`, the chosen
        part of it. For comparison, the far mass in other sets of as many
        entries: `window_read` (sinks and last entries), `shared_read` (the best set of each KV
        head for all layers), `own_read` (the best sets that layers and heads share as the selector's do),
        `oracle_read` (the best set of each layer and KV head); `gained`, `shared_gap` and `own_gap` are the
        mass that the selector and these sets have beyond the window. Each also as a mean of shares, in which
        heads, layers and steps count the same however little of their mass is far: `far_share`, ...,
        `own_gap_share`. `far_mass_N` and `far_read_N` are the values of layer N.
        `overlap` and `oracle_overlap`: share of a set's entries that were also in the previous choice;
        `lru_overlap`: share that an LRU buffer of twice the set's size would hold.
    """
    target.info.require_full_layers("the recall of selected entries")
    told = copy.copy(selector)
    told.budget = replace(selector.budget, dense_layers=tuple(range(target.info.n_layers)))
    read = read_contexts(target, Parts(selector=told, name=told.name), prompts, scored=given)
    assert isinstance(read.cache, SelectedCache)
    ids_BT = torch.tensor([list(some) for some in given], device=target.device)
    tally = _Tally(target, selector, len(prompts))
    queries: dict[int, Tensor] = {}

    def look(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        queries[layer] = q_BHTD[:, :, 0].clone()

    before = len(prompts[0])
    for t in range(ids_BT.shape[1]):
        rows = TokenBatch(read.cache.len_B[:, None].clone(), ids_BT[:, t : t + 1])
        given_step(target, read.cache, rows, outputs=OutputRequest("none"), selector=told, hook=look)
        tally.add(_weights(queries, read.cache), before + t, read.cache)
    return tally.metrics()


@dataclass
class _Tally:
    """Sums over decoding steps. Args: see `recall`."""

    target: Target
    selector: Selector
    batch: int
    sums: dict[str, Tensor] = field(default_factory=lambda: defaultdict(lambda: torch.zeros(())))
    steps: int = 0
    choices: int = 0
    last: dict[str, Tensor] = field(default_factory=dict)
    lru: LruBuffer | None = None

    def __post_init__(self) -> None:
        info, device = self.target.info, self.target.device
        each_LG = torch.arange(info.n_layers * info.n_kv_heads, device=device).view(info.n_layers, -1)
        own = self.selector.table_LG
        self.each_LG = each_LG
        self.own_LG = each_LG if own is None else own.to(device)
        self.shared_LG = torch.arange(info.n_kv_heads, device=device).expand_as(each_LG)

    def add(self, p_BLGS: Tensor, before: int, cache: SelectedCache) -> None:
        """Add a step's attention weights, over `before` entries and the step's own."""
        budget, (B, _, _, S) = self.selector.budget, p_BLGS.shape
        slot_S = torch.arange(S, device=p_BLGS.device)
        far_BLGS = p_BLGS * ((slot_S >= SINKS) & (slot_S < before - NEAR))
        window_BXS = slot_S[:before].float().expand(B, 1, before)
        sets = cache.entry_sets
        assert sets is not None
        own = Sets(sets.idx_BXK, sets.since_B).mask(S)
        best = _best(p_BLGS[..., :before], self.each_LG, budget, S)
        reads = {
            "far": own[:, self.own_LG],
            "window": _best(window_BXS, None, budget, S),
            "shared": _best(p_BLGS[..., :before], self.shared_LG, budget, S)[:, self.shared_LG],
            "own": _best(p_BLGS[..., :before], self.own_LG, budget, S)[:, self.own_LG],
            "oracle": best[:, self.each_LG],
        }
        if budget.dense_layers:
            reads["far"][:, list(budget.dense_layers)] = True
        mass_BLG = far_BLGS.sum(-1)
        for name, mask in reads.items():
            read_BLG = (far_BLGS * mask.view(B, -1, mask.shape[-2], S)).sum(-1)
            self._sum(f"{name}_read", read_BLG)
            self._sum(f"{name}_share", read_BLG / mass_BLG.clamp(min=torch.finfo(mass_BLG.dtype).tiny))
        self._sum("far_mass", mass_BLG)
        self._sum("total_read", (p_BLGS * reads["far"]).sum(-1))
        self.steps += 1
        if bool(sets.due_B.all()):
            self._overlap("overlap", own[..., :before])
            self._overlap("oracle_overlap", best[..., :before])
            self._buffered(sets, cache.held.capacity)

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of `recall`, one mapping per prompt."""
        found: list[dict[str, float]] = [{} for _ in range(self.batch)]
        for name, sum_BL in self.sums.items():
            count = self.choices if name.endswith("overlap") else self.steps
            values = (sum_BL / count).tolist()
            for one, layers in zip(found, values, strict=True):
                one[name] = sum(layers) / len(layers)
                if name in ("far_mass", "far_read"):
                    one |= {f"{name}_{layer}": value for layer, value in enumerate(layers)}
        for one in found:
            for kind, tail in (("read", ""), ("share", "_share")):
                one[f"gained{tail}"] = one[f"far_{kind}"] - one[f"window_{kind}"]
                for name in ("shared", "own"):
                    one[f"{name}_gap{tail}"] = one[f"{name}_{kind}"] - one[f"window_{kind}"]
        return found

    def _sum(self, name: str, value_BLG: Tensor) -> None:
        self.sums[name] = self.sums[name].to(value_BLG.device) + value_BLG.double().mean(-1)

    def _overlap(self, name: str, mask_BXS: Tensor) -> None:
        """Add the share of a set's entries that were also in the previous choice."""
        before, self.last[name] = self.last.get(name), mask_BXS
        if before is None:
            self.choices = 0
            return
        both = (mask_BXS[..., : before.shape[-1]] & before).sum(-1) / mask_BXS.sum(-1)
        self.sums[name] = self.sums[name].to(both.device) + both.double()
        self.choices += name == "overlap"

    def _buffered(self, sets: EntrySets, slots: int) -> None:
        """Add the share of a set's entries that an LRU buffer of twice its size would hold."""
        (B, X, K), begun = sets.idx_BXK.shape, self.lru is not None
        self.lru = self.lru or LruBuffer(B, X, 2 * K, rows=slots, device=sets.n_B.device)
        here_BX = 1 - self.lru.use(sets.idx_BXK, sets.n_B) / sets.n_B[:, None]
        if begun:
            self.sums["lru_overlap"] = self.sums["lru_overlap"].to(here_BX.device) + here_BX.double()


def _best(scores: Tensor, table_LG: Tensor | None, budget: ReadBudget, slots: int) -> Tensor:
    """Sets of the highest scores as a mask over all cache positions, including all from the last scored one
    on.

    Args:
        scores: scores of each layer's entries [B, L, G, S], summed over the layers and heads that share a
            set; without a table, scores of the sets themselves [B, X, S].
        table_LG: index of the set that each layer's KV head uses.
        budget: number of entries, and the sinks and recent ones that are always included.
        slots: number of cache positions of the mask.
    """
    if table_LG is not None:
        B, L, G, S = scores.shape
        sums = scores.new_zeros(B, 1 + int(table_LG.max()), S)
        scores = sums.index_add_(1, table_LG.flatten(), scores.reshape(B, L * G, S))
    since_B = torch.full((scores.shape[0],), scores.shape[-1], device=scores.device)
    return Sets(choose_entries(scores, since_B, budget), since_B).mask(slots)


def _weights(queries: dict[int, Tensor], cache: SelectedCache) -> Tensor:
    """Attention weights of the last committed token on all entries including itself, mean over query heads,
    p_BLGS.
    """
    S, store = cache.used, cache.held
    seen_S = torch.arange(S, device=cache.len_B.device) < cache.len_B[0]
    layers = []
    for layer in sorted(queries):
        q_BHD, k_BGSD = queries[layer], store.k_LBGSD[layer, :, :, :S]
        weights_BHS = head_weights(q_BHD, k_BGSD, seen_S.expand(len(q_BHD), S), scale=q_BHD.shape[-1] ** -0.5)
        layers.append(weights_BHS.unflatten(1, (k_BGSD.shape[1], -1)).mean(2))
    return torch.stack(layers, 1)
