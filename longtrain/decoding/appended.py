"""Rows that follow a prompt which is in the cache already, read in as many steps as the cache asks for.

Shapes: B batch, T rows after each prompt, C rows of a step, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.decoding.retrieval.selector import Selector, choose
from longtrain.decoding.roles import Parts, Verdict
from longtrain.decoding.tree import chain
from longtrain.targets.attention import Watch
from longtrain.targets.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target


def read_after(
    target: Target,
    cache: KVCache,
    ids_BT: Tensor,
    lengths: Sequence[int],
    *,
    hidden: tuple[int, ...] = (),
    watch: Watch | None = None,
    most: int | None = None,
) -> tuple[TargetStep, int]:
    """Commit rows behind what is in the cache.

    One forward takes them all, unless the cache takes few rows a step (`KVCache.step_limit`) or changes what
    it keeps at certain tokens (`KVCache.commit_limit`): a step then ends there in every sequence, as in
    decoding, so that what is kept does not depend on how the rows came.

    Args:
        target: the frozen model.
        cache: committed.
        ids_BT: token ids, right-padded.
        lengths: rows of each sequence, none 0.
        hidden: layers whose output is wanted.
        watch: sees the rows of all steps as one, right-padded.
        most: rows that a step may take, where the cache allows more; None: all.

    Returns:
        the logits of each sequence's last row [B, 1, V], hidden states [B, T, E]; and how many forwards.
    """
    B, T = ids_BT.shape
    device = ids_BT.device
    read, forwards = [0] * B, 0
    logits_B1V: Tensor | None = None
    states: dict[int, Tensor] = {}
    seen = WatchBuffer(watch, B, T) if watch else None
    while read != list(lengths):
        left = [min(n - done, most or n) for n, done in zip(lengths, read, strict=True)]
        counts = rows_of_next_step(cache, left)
        first_B, n_B = torch.tensor([read, counts], device=device)
        at_BC = first_B[:, None] + torch.arange(max(counts), device=device)
        pos_BC = cache.len_B[:, None] + torch.arange(max(counts), device=device)
        rows = Rows(pos_BC, ids_BT.gather(1, at_BC.clamp(max=T - 1)), n_B=n_B)
        one_step = watch if seen is None or counts == list(lengths) else seen.at(at_BC)
        step = target.forward(rows, cache, want=Want("last", hidden), watch=one_step)
        cache.commit(None, n_B)
        assert step.logits_BTV is not None
        logits_B1V = (
            step.logits_BTV
            if logits_B1V is None
            else torch.where((n_B > 0)[:, None, None], step.logits_BTV, logits_B1V)
        )
        for layer in hidden:
            states[layer] = _put(states.get(layer), step.hidden[layer], at_BC, T)
        read = [done + n for done, n in zip(read, counts, strict=True)]
        forwards += 1
    if seen:
        seen.show()
    return TargetStep(logits_B1V, {layer: state[:, :T] for layer, state in states.items()}), forwards


def given_step(
    target: Target,
    cache: KVCache,
    rows: Rows,
    *,
    want: Want,
    selector: Selector | None = None,
    watch: Watch | None = None,
) -> TargetStep:
    """A step over tokens of a text that is given, not decoded; its valid rows are committed.

    Args:
        target: the frozen model.
        cache: committed.
        rows: token ids, no more of a sequence than `cache.commit_limit()` says.
        want: what comes back.
        selector: says what the step reads, as in decoding; it was started.
        watch: sees the step's queries, keys and values.
    """
    assert rows.ids_BT is not None
    ids_BT, n_B = rows.ids_BT, rows.n_B
    if n_B is None:
        n_B = torch.full_like(cache.len_B, ids_BT.shape[1])
    if selector is not None:
        choose(selector, ids_BT[:, 0])
        hidden = (*want.hidden, *Parts(selector=selector).hidden())
        want = replace(want, hidden=tuple(sorted({*hidden})))
    step = target.forward(rows, cache, want=want, watch=watch)
    cache.commit(None, n_B)
    if selector is not None:
        path_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        selector.observe(chain(ids_BT), Verdict(path_BT, n_B, ids_BT[:, -1]), step)
    return step


class WatchBuffer:
    """Gathers what a watch is to see of several steps, and shows it at the end, a layer at a time.

    Args:
        watch: is shown all rows at once.
        batch: sequences.
        rows: rows of the longest sequence.
    """

    def __init__(self, watch: Watch, batch: int, rows: int) -> None:
        self._watch, self._batch, self._rows = watch, batch, rows
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def at(self, at_BC: Tensor) -> Watch:
        """What sees one step, whose rows are these."""

        def look(layer: int, q_BHCD: Tensor, k_BGCD: Tensor, v_BGCD: Tensor) -> None:
            before = self._kept.get(layer, (None, None, None))
            self._kept[layer] = tuple(
                _put(old, new.transpose(1, 2), at_BC, self._rows)
                for old, new in zip(before, (q_BHCD, k_BGCD, v_BGCD), strict=True)
            )

        return look

    def show(self) -> None:
        """To the watch, what was gathered; nothing if it has seen the rows itself."""
        for layer, parts in self._kept.items():
            q, k, v = (x[:, : self._rows].transpose(1, 2) for x in parts)
            self._watch(layer, q, k, v)


def rows_of_next_step(cache: KVCache, left: Sequence[int]) -> list[int]:
    """Rows of each sequence that the next step takes; waits for the device where the cache has a say."""
    most, limit_B = cache.step_limit(), cache.commit_limit()
    limits = [most or n for n in left] if limit_B is None else [min(most or n, n) for n in limit_B.tolist()]
    return [min(n, limit) for n, limit in zip(left, limits, strict=True)]


def _put(whole_BTx: Tensor | None, new_BCx: Tensor, at_BC: Tensor, rows: int) -> Tensor:
    """A step's rows at their places among all; one more row at the end takes what lies beyond them."""
    B = len(at_BC)
    if whole_BTx is None:
        whole_BTx = new_BCx.new_zeros(B, rows + 1, *new_BCx.shape[2:])
    whole_BTx[torch.arange(B, device=at_BC.device)[:, None], at_BC.clamp(max=rows)] = new_BCx
    return whole_BTx
