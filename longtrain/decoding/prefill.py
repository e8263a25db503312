"""Prefill: reads prompts into a cache, evicts, and appends tokens that the evictor must not see.

Shapes: B batch, S prompt tokens, T tokens after eviction, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import compact
from longtrain.costs.model import window_slots
from longtrain.decoding.appended import read_after
from longtrain.decoding.evict import Evictor, Keep, PromptRun, goes_on, on_layers
from longtrain.decoding.roles import AttentionObserver
from longtrain.errors import TargetMismatchError
from longtrain.targets.attention import AttentionHook, Inputs
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

_CLOSE = 1e-6
"""Relative distance of two scales that are the same."""


@dataclass(frozen=True)
class Prefilled:
    """Result of a prefill.

    Args:
        cache: committed; smaller than the prompts after eviction.
        tokens_BS: all tokens read, right-padded.
        n_B: number of tokens of each sequence.
        step: logits of each last token; hidden states of all tokens.
        full_bytes: bytes of the cache without eviction: without positions that only the evictor needs (pseudo
            answers), and without entries that leave every window.
        kept_entries: KV entries of each prompt after eviction, mean over the layers that see the whole text
            and KV heads.
        forwards: number of target forwards.
        kept: the entries that remain; None: nothing was evicted.
    """

    cache: KVCache
    tokens_BS: Tensor
    n_B: Tensor
    step: TargetStep
    full_bytes: int
    kept_entries: list[float]
    forwards: int
    kept: Keep | None = None


def prefill(
    target: Target,
    new_cache: Callable[..., KVCache],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    nodes: int,
    hidden: tuple[int, ...] = (),
    evictor: Evictor | None = None,
    attention_observer: AttentionObserver | None = None,
    after: Sequence[Sequence[int]] | None = None,
    sequence_ids: Sequence[int] | None = None,
) -> Prefilled:
    """Read the prompts in one forward, evict, and read the tokens that follow.

    Args:
        target: the frozen model.
        new_cache: makes the cache of the prompts (`Target.new_cache`).
        prompts: token ids, already checked.
        max_new_tokens: positions to be committed later.
        nodes: most tokens of a later step.
        hidden: layers whose outputs are returned.
        evictor: chooses the prompts' entries that remain; it does not see `after`.
        attention_observer: a draft that observes the whole prompts and `after`.
        after: tokens that follow each prompt, none empty.
        sequence_ids: ids of the sequences in random draws; None: the indices of the prompts.

    Raises:
        TargetMismatchError: the target's attention is none whose entries the evictor can choose.
    """
    if evictor is not None:
        _check_evictor(evictor, target)
    lengths, device = tuple(map(len, prompts)), target.device
    room = max_new_tokens + (max(map(len, after)) if after else 0)
    extra = evictor.extra_tokens(max(lengths)) if evictor else 0
    scratch = max(0, extra - room - nodes)
    cache = new_cache(len(prompts), max(lengths) + room, nodes + scratch)
    tokens_BS, n_B = pad(prompts, device)
    hook = evictor.hook(lengths) if evictor else None
    watching = on_layers(hook, target.info)
    looking = attention_observer.prompt_hook(lengths) if attention_observer else None
    pos_BS = torch.arange(tokens_BS.shape[1], device=device).expand_as(tokens_BS)
    outputs = OutputRequest("last", hidden)
    batch = TokenBatch(pos_BS, tokens_BS, n_B=n_B)
    step = target.forward(batch, cache, outputs=outputs, hook=_both(watching, looking))
    cache.commit(None, n_B)
    full_bytes, kept_entries = cache.bytes(), [float(length) for length in lengths]
    keep: Keep | None = None
    if evictor:
        assert isinstance(cache, DenseCache) and step.logits_BTV is not None
        slot = cache.k_LBGSD[..., 0, :].nbytes + cache.v_LBGSD[..., 0, :].nbytes
        idle = _idle_rows(target.info, max(lengths) + room + nodes, nodes)
        full_bytes -= round(slot * (scratch + idle / target.info.n_layers))
        logits_BV = step.logits_BTV[:, -1]
        root_B = logits_BV.argmax(-1)
        run = PromptRun(
            target, cache, lengths, tokens_BS, n_B, root_B, hook, max_new_tokens, logits_BV, sequence_ids
        )
        keep = evictor.select(run)
        if keep is not None:
            cache = (
                evictor.thinning(run, keep, nodes=nodes)
                if goes_on(evictor)
                else compact(run.cache, keep, lengths, room=room + nodes, nodes=nodes)
            )
            kept_entries = keep.n_LBG.double().mean((0, 2)).tolist()
        del run, hook  # free the whole cache and the stored queries before anything else is run
    if after is None:
        return Prefilled(cache, tokens_BS, n_B, step, full_bytes, kept_entries, 1, keep)
    ids_BT, m_B = pad(after, device)
    pos_BT = n_B[:, None] + torch.arange(ids_BT.shape[1], device=device)
    then, steps = read_after(target, cache, ids_BT, tuple(map(len, after)), hidden=hidden, hook=looking)
    tokens_BS = _appended(tokens_BS, ids_BT, pos_BT)
    joined = {layer: _appended(step.hidden[layer], then.hidden[layer], pos_BT) for layer in hidden}
    last = TargetStep(then.logits_BTV, joined)
    return Prefilled(cache, tokens_BS, n_B + m_B, last, full_bytes, kept_entries, 1 + steps, keep)


def pad(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists padded on the right with id 0, and their lengths."""
    longest = max(map(len, lists))
    padded = [[*one, *[0] * (longest - len(one))] for one in lists]
    return torch.tensor(padded, device=device), torch.tensor([len(one) for one in lists], device=device)


def _check_evictor(evictor: Evictor, target: Target) -> None:
    """Refuse a target whose layers all have a window, or another scale than most evictors' scores."""
    info = target.info
    if not info.full_layers:
        info.require_full_layers(f"eviction ({evictor.name})")
    if goes_on(evictor):
        info.require_full_layers("eviction during decoding")
    plain = abs(target.scaling(0) * info.head_dim**0.5 - 1) <= _CLOSE
    if not plain and not getattr(evictor, "any_scale", False):
        raise TargetMismatchError(
            f"eviction ({evictor.name}) scores entries at the scale head_dim ** -0.5, and target {info.name} "
            f"has the scale {target.scaling(0):.4g} with heads of {info.head_dim}; leave it out"
        )


def _idle_rows(info: TargetInfo, slots: int, nodes: int) -> int:
    """Return how many of `slots` entries of each layer no `WindowCache` would store, in all layers."""
    windows = [window for window in info.windows if window]
    return len(windows) * max(0, slots - window_slots(max(windows), nodes)) if windows else 0


def _both(one: AttentionHook | None, other: AttentionHook | None) -> AttentionHook | None:
    """Combine two optional hooks into one."""
    return one or other if one is None or other is None else _Both((one, other))


class _Both:
    """Calls two hooks, with the inputs of attention only those that have `see_inputs`."""

    def __init__(self, hooks: tuple[AttentionHook, AttentionHook]) -> None:
        self._hooks = hooks
        looks = [getattr(hook, "see_inputs", None) for hook in hooks]
        self._looks: list[Inputs] = [look for look in looks if look is not None]

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Call both with one layer's queries, keys and values."""
        for hook in self._hooks:
            hook(layer, q_BHTD, k_BGTD, v_BGTD)

    def see_inputs(self, layer: int, x_BTE: Tensor) -> None:
        """Call with the input of one layer's attention."""
        for look in self._looks:
            look(layer, x_BTE)


def _appended(first_BSx: Tensor, then_BTx: Tensor, pos_BT: Tensor) -> Tensor:
    """Place the second's tokens at their positions behind those of the first: [B, S + T, ...]."""
    B, T = pos_BT.shape
    whole = torch.cat((first_BSx, first_BSx.new_zeros(B, T, *first_BSx.shape[2:])), 1)
    whole[torch.arange(B, device=pos_BT.device)[:, None], pos_BT] = then_BTx
    return whole
