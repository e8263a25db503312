"""Reads tokens that follow a prompt which is in the cache already, in as many steps as the cache requires.

Shapes: B batch, T tokens after each prompt, C tokens of a step, H heads, D head dim.
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
from longtrain.targets.attention import AttentionHook
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target


def read_after(
    target: Target,
    cache: KVCache,
    ids_BT: Tensor,
    lengths: Sequence[int],
    *,
    hidden: tuple[int, ...] = (),
    hook: AttentionHook | None = None,
) -> tuple[TargetStep, int]:
    """Append tokens to the cache and commit them.

    One forward reads them all, unless the cache limits the tokens of a step (`KVCache.step_limit`) or changes
    its stored entries at certain tokens (`KVCache.commit_limit`). A step then ends there in every sequence,
    as in decoding, so that the stored entries do not depend on the way tokens were read.

    Args:
        target: the frozen model.
        cache: committed.
        ids_BT: token ids, right-padded.
        lengths: tokens of each sequence, none 0.
        hidden: layers whose outputs are returned.
        hook: hook that gets the tokens of all steps at once, right-padded.

    Returns:
        logits of each sequence's last token [B, 1, V], hidden states [B, T, E], and the number of forwards.
    """
    B, T = ids_BT.shape
    device = ids_BT.device
    read, forwards = [0] * B, 0
    logits_B1V: Tensor | None = None
    states: dict[int, Tensor] = {}
    seen = HookBuffer(hook, B, T) if hook else None
    while read != list(lengths):
        left = [n - done for n, done in zip(lengths, read, strict=True)]
        counts = tokens_of_next_step(cache, left)
        first_B, n_B = torch.tensor([read, counts], device=device)
        at_BC = first_B[:, None] + torch.arange(max(counts), device=device)
        pos_BC = cache.len_B[:, None] + torch.arange(max(counts), device=device)
        batch = TokenBatch(pos_BC, ids_BT.gather(1, at_BC.clamp(max=T - 1)), n_B=n_B)
        one_step = hook if seen is None or counts == list(lengths) else seen.at(at_BC)
        step = target.forward(batch, cache, outputs=OutputRequest("last", hidden), hook=one_step)
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
    batch: TokenBatch,
    *,
    outputs: OutputRequest,
    selector: Selector | None = None,
    hook: AttentionHook | None = None,
) -> TargetStep:
    """One teacher-forced step: run the target over given tokens and commit the valid ones.

    Args:
        target: the frozen model.
        cache: committed.
        batch: token ids; at most `cache.commit_limit()` of each sequence.
        outputs: outputs to return.
        selector: chooses the KV entries that the step reads, as in decoding; already started.
        hook: hook that gets the step's queries, keys and values.
    """
    assert batch.ids_BT is not None
    ids_BT, n_B = batch.ids_BT, batch.n_B
    if n_B is None:
        n_B = torch.full_like(cache.len_B, ids_BT.shape[1])
    if selector is not None:
        choose(selector, ids_BT[:, 0])
        hidden = (*outputs.hidden, *Parts(selector=selector).hidden())
        outputs = replace(outputs, hidden=tuple(sorted({*hidden})))
    step = target.forward(batch, cache, outputs=outputs, hook=hook)
    cache.commit(None, n_B)
    if selector is not None:
        path_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        selector.observe(chain(ids_BT), Verdict(path_BT, n_B, ids_BT[:, -1]), step)
    return step


class HookBuffer:
    """Collects queries, keys and values of several steps, and passes them to a hook layer by layer.

    Args:
        hook: the hook, called with all tokens at once.
        batch: number of sequences.
        longest: tokens of the longest sequence.
    """

    def __init__(self, hook: AttentionHook, batch: int, longest: int) -> None:
        self._hook, self._batch, self._longest = hook, batch, longest
        self._collected: dict[int, tuple[Tensor, ...]] = {}

    def at(self, at_BC: Tensor) -> AttentionHook:
        """A hook for one step, whose tokens have the indices `at_BC`."""

        def look(layer: int, q_BHCD: Tensor, k_BGCD: Tensor, v_BGCD: Tensor) -> None:
            before = self._collected.get(layer, (None, None, None))
            self._collected[layer] = tuple(
                _put(old, new.transpose(1, 2), at_BC, self._longest)
                for old, new in zip(before, (q_BHCD, k_BGCD, v_BGCD), strict=True)
            )

        return look

    def show(self) -> None:
        """Call the hook with the collected tensors, if there are any."""
        for layer, parts in self._collected.items():
            q, k, v = (x[:, : self._longest].transpose(1, 2) for x in parts)
            self._hook(layer, q, k, v)


def tokens_of_next_step(cache: KVCache, left: Sequence[int]) -> list[int]:
    """Tokens of each sequence in the next step; synchronises with the device if the cache has a limit."""
    most, limit_B = cache.step_limit(), cache.commit_limit()
    limits = [most or n for n in left] if limit_B is None else [min(most or n, n) for n in limit_B.tolist()]
    return [min(n, limit) for n, limit in zip(left, limits, strict=True)]


def _put(whole_BTx: Tensor | None, new_BCx: Tensor, at_BC: Tensor, longest: int) -> Tensor:
    """Scatter a step's tokens [B, C, ...] into all tokens [B, longest + 1, ...]; the last is for padding."""
    B = len(at_BC)
    if whole_BTx is None:
        whole_BTx = new_BCx.new_zeros(B, longest + 1, *new_BCx.shape[2:])
    whole_BTx[torch.arange(B, device=at_BC.device)[:, None], at_BC.clamp(max=longest)] = new_BCx
    return whole_BTx
