"""How much of the target's attention lies on the rows that a selector reads.

The target is told a text token by token and reads all of it, while the selector chooses as if steps read
nothing else: what it knows is then what the target itself knows, and the attention is the target's own. Mass
far from the query says more than all of it: most lies on the first rows and the last, which any set has.

Shapes: B texts of one length, T tokens after them, L layers, H query heads, G KV heads, S rows, X sets,
K rows of a set, D head dim.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.row_sets import ReadBudget, RowSets, choose_rows
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.appended import given_step
from longtrain.decoding.retrieval.lru import LruBuffer
from longtrain.decoding.retrieval.scores import head_weights
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts
from longtrain.evaluation.perplexity import read_contexts
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

SINKS, NEAR = 4, 64
"""Rows that are not far: the first of the text, and the last before the query."""


@dataclass(frozen=True)
class Sets:
    """What one step reads: `idx_BXK`, and every row from `since_B` on."""

    idx_BXK: Tensor
    since_B: Tensor

    def mask(self, slots: int) -> Tensor:
        """Which of the first slots each set has, bool_BXS."""
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
    *,
    skip: int = 0,
    rolled: Sequence[Sets] = (),
) -> list[dict[str, float]]:
    """Attention of the tokens after each prompt on what is read of the rows before them.

    Args:
        target: the frozen model.
        selector: chooses; the target reads everything all the same.
        prompts: token ids, of one length.
        given: the tokens after each, of one length.
        skip: of these so many first ones are not measured.
        rolled: what each measured step read in another run over the same text.

    Returns:
        For each text, means over steps, layers and query heads: `total_read` of all mass, `far_mass` outside
        the first `SINKS` rows and the last `NEAR`, and `far_read` of it. Beside it what other sets of as many
        rows read of the far mass: `window_read` (sinks and last rows), `shared_read` (the best set of each KV
        head for all layers), `own_read` (the best sets that layers and heads share as the selector's do),
        `oracle_read` (the best set of each layer and KV head); `gained`, `shared_gap` and `own_gap` are what
        the selector and these have beyond the window. Each also as a mean of shares, in which heads, layers
        and steps count the same however little of their mass is far: `far_share`, ..., `own_gap_share`.
        `far_mass_N` and `far_read_N` are those of layer N.
        `overlap` and `oracle_overlap`: rows of a set that were in it at the choice before, as a share;
        `lru_overlap`: those that a buffer of twice a set's rows, the ones read last, would have.
        `rolled_read`: what `rolled` reads of the far mass.
    """
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
        rows = Rows(read.cache.len_B[:, None].clone(), ids_BT[:, t : t + 1])
        given_step(target, read.cache, rows, want=Want("none"), selector=told, watch=look)
        if t >= skip:
            sets = rolled[t - skip] if rolled else None
            tally.add(_weights(queries, read.cache), before + t, read.cache, sets)
    return tally.figures()


@torch.no_grad()
def roll_out(
    target: Target, parts: Parts, prompts: Sequence[Sequence[int]], tokens: int, *, last: int
) -> tuple[list[list[int]], list[Sets]]:
    """Decode greedily from chosen rows.

    Args:
        target: the frozen model.
        parts: bring the selector.
        prompts: token ids.
        tokens: new tokens of each text; none ends it.
        last: steps of which the sets are wanted.

    Returns:
        The new tokens, and what the last steps read, which are those over the last tokens.
    """
    selector = parts.selector
    assert selector is not None
    room = [[0] * tokens for _ in prompts]
    read = read_contexts(target, Parts(selector=selector, name=parts.name), prompts, scored=room)
    assert isinstance(read.cache, SelectedCache) and read.step.logits_BTV is not None
    found: list[Tensor] = []
    kept: list[Sets] = []
    new_B = read.step.logits_BTV[:, -1].argmax(-1)
    for t in range(tokens):
        found.append(new_B)
        rows = Rows(read.cache.len_B[:, None].clone(), new_B[:, None])
        step = given_step(target, read.cache, rows, want=Want("last"), selector=selector)
        if t >= tokens - last:
            kept.append(_chosen(read.cache))
        assert step.logits_BTV is not None
        new_B = step.logits_BTV[:, -1].argmax(-1)
    return torch.stack(found, 1).tolist(), kept


@dataclass
class _Tally:
    """Sums over steps. Args: see `recall`."""

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

    def add(self, p_BLGS: Tensor, before: int, cache: SelectedCache, rolled: Sets | None) -> None:
        """A step's attention, over `before` rows and its own."""
        budget, (B, _, _, S) = self.selector.budget, p_BLGS.shape
        slot_S = torch.arange(S, device=p_BLGS.device)
        far_BLGS = p_BLGS * ((slot_S >= SINKS) & (slot_S < before - NEAR))
        window_BXS = slot_S[:before].float().expand(B, 1, before)
        own = _chosen(cache).mask(S)
        best = _best(p_BLGS[..., :before], self.each_LG, budget, S)
        reads = {
            "far": own[:, self.own_LG],
            "window": _best(window_BXS, None, budget, S),
            "shared": _best(p_BLGS[..., :before], self.shared_LG, budget, S)[:, self.shared_LG],
            "own": _best(p_BLGS[..., :before], self.own_LG, budget, S)[:, self.own_LG],
            "oracle": best[:, self.each_LG],
            **({} if rolled is None else {"rolled": rolled.mask(S)[:, self.own_LG]}),
        }
        for name in ("far", "rolled"):
            if name in reads and budget.dense_layers:
                reads[name][:, list(budget.dense_layers)] = True
        mass_BLG = far_BLGS.sum(-1)
        for name, mask in reads.items():
            read_BLG = (far_BLGS * mask.view(B, -1, mask.shape[-2], S)).sum(-1)
            self._sum(f"{name}_read", read_BLG)
            self._sum(f"{name}_share", read_BLG / mass_BLG.clamp(min=torch.finfo(mass_BLG.dtype).tiny))
        self._sum("far_mass", mass_BLG)
        self._sum("total_read", (p_BLGS * reads["far"]).sum(-1))
        self.steps += 1
        sets = cache.row_sets
        assert sets is not None
        if bool(sets.due_B.all()):
            self._overlap("overlap", own[..., :before])
            self._overlap("oracle_overlap", best[..., :before])
            self._buffered(sets, cache.held.capacity)

    def figures(self) -> list[dict[str, float]]:
        """One mapping a text."""
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
        """Share of a set's rows that were in it at the choice before."""
        before, self.last[name] = self.last.get(name), mask_BXS
        if before is None:
            self.choices = 0
            return
        both = (mask_BXS[..., : before.shape[-1]] & before).sum(-1) / mask_BXS.sum(-1)
        self.sums[name] = self.sums[name].to(both.device) + both.double()
        self.choices += name == "overlap"

    def _buffered(self, sets: RowSets, slots: int) -> None:
        """Share of a set's rows that a buffer of twice as many, those read last, would have."""
        (B, X, K), begun = sets.idx_BXK.shape, self.lru is not None
        self.lru = self.lru or LruBuffer(B, X, 2 * K, rows=slots, device=sets.n_B.device)
        here_BX = 1 - self.lru.use(sets.idx_BXK, sets.n_B) / sets.n_B[:, None]
        if begun:
            self.sums["lru_overlap"] = self.sums["lru_overlap"].to(here_BX.device) + here_BX.double()


def _chosen(cache: SelectedCache) -> Sets:
    """What the step that was taken read."""
    sets = cache.row_sets
    assert sets is not None
    return Sets(sets.idx_BXK.clone(), sets.since_B.clone())


def _best(scores: Tensor, table_LG: Tensor | None, budget: ReadBudget, slots: int) -> Tensor:
    """Sets of the highest scores as a mask over all slots, those from the last scored one on included.

    Args:
        scores: of each layer's rows [B, L, G, S], summed over those that share a set; without a table of the
            sets themselves [B, X, S].
        table_LG: the set of each layer's KV heads.
        budget: how many rows, and which in any case.
        slots: of the mask.
    """
    if table_LG is not None:
        B, L, G, S = scores.shape
        sums = scores.new_zeros(B, 1 + int(table_LG.max()), S)
        scores = sums.index_add_(1, table_LG.flatten(), scores.reshape(B, L * G, S))
    since_B = torch.full((scores.shape[0],), scores.shape[-1], device=scores.device)
    return Sets(choose_rows(scores, since_B, budget), since_B).mask(slots)


def _weights(queries: dict[int, Tensor], cache: SelectedCache) -> Tensor:
    """Attention of the row that was committed last on all rows and itself, mean over query heads, p_BLGS."""
    S, store = cache.used, cache.held
    seen_S = torch.arange(S, device=cache.len_B.device) < cache.len_B[0]
    layers = []
    for layer in sorted(queries):
        q_BHD, k_BGSD = queries[layer], store.k_LBGSD[layer, :, :, :S]
        weights_BHS = head_weights(q_BHD, k_BGSD, seen_S.expand(len(q_BHD), S), scale=q_BHD.shape[-1] ** -0.5)
        layers.append(weights_BHS.unflatten(1, (k_BGSD.shape[1], -1)).mean(2))
    return torch.stack(layers, 1)
