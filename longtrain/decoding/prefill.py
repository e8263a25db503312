"""From prompts to a cache that decoding can go on from: prefill, eviction, and rows kept out of its view.

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
from longtrain.decoding.appended import read_after
from longtrain.decoding.evict import Evictor, GoingOn, Keep, PromptRun
from longtrain.decoding.roles import Onlooker
from longtrain.targets.attention import Inputs, Watch
from longtrain.targets.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Prefilled:
    """Prompts that were read.

    Args:
        cache: committed; holds less than the prompts after eviction.
        tokens_BS: everything read, right-padded.
        n_B: how many of each.
        step: logits of each last token; hidden states of everything read.
        full_bytes: bytes of the cache before eviction, as decoding without an evictor would have it; rows
            that only the evictor needs (pseudo answers) are not counted.
        kept_rows: rows of each prompt in the cache after it, mean over layers and KV heads.
        forwards: how many forwards of the target there were.
        kept: which rows eviction kept; None where nothing was evicted.
    """

    cache: KVCache
    tokens_BS: Tensor
    n_B: Tensor
    step: TargetStep
    full_bytes: int
    kept_rows: list[float]
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
    onlooker: Onlooker | None = None,
    after: Sequence[Sequence[int]] | None = None,
    sequence_ids: Sequence[int] | None = None,
) -> Prefilled:
    """Read the prompts in one forward, evict, and read what comes after.

    Args:
        target: the frozen model.
        new_cache: makes the cache of the prompts (`Target.new_cache`).
        prompts: token ids, checked.
        max_new_tokens: positions to be committed later on.
        nodes: most rows of a later step.
        hidden: layers whose output is wanted.
        evictor: chooses what of the prompts stays; it sees nothing of `after`.
        onlooker: sees the prompts, whole, and `after`.
        after: rows of each sequence that follow its prompt, none empty.
        sequence_ids: what random coins know a sequence by; None numbers the prompts.
    """
    lengths, device = tuple(map(len, prompts)), target.device
    room = max_new_tokens + (max(map(len, after)) if after else 0)
    extra = evictor.extra_rows(max(lengths)) if evictor else 0
    scratch = max(0, extra - room - nodes)
    cache = new_cache(len(prompts), max(lengths) + room, nodes + scratch)
    tokens_BS, n_B = pad(prompts, device)
    watch = evictor.watch(lengths) if evictor else None
    looking = onlooker.watch_prompts(lengths) if onlooker else None
    pos_BS = torch.arange(tokens_BS.shape[1], device=device).expand_as(tokens_BS)
    want = Want("last", hidden)
    rows = Rows(pos_BS, tokens_BS, n_B=n_B)
    step = target.forward(rows, cache, want=want, watch=_both(watch, looking))
    cache.commit(None, n_B)
    full_bytes, kept_rows = cache.bytes(), [float(length) for length in lengths]
    keep: Keep | None = None
    if evictor:
        assert isinstance(cache, DenseCache) and step.logits_BTV is not None
        full_bytes -= scratch * (cache.k_LBGSD[..., 0, :].nbytes + cache.v_LBGSD[..., 0, :].nbytes)
        logits_BV = step.logits_BTV[:, -1]
        root_B = logits_BV.argmax(-1)
        run = PromptRun(
            target, cache, lengths, tokens_BS, n_B, root_B, watch, max_new_tokens, logits_BV, sequence_ids
        )
        keep = evictor.select(run)
        if keep is not None:
            cache = (
                evictor.thinning(run, keep, nodes=nodes)
                if isinstance(evictor, GoingOn) and evictor.decoding
                else compact(run.cache, keep, lengths, room=room + nodes)
            )
            kept_rows = cache.n_LBG.double().mean((0, 2)).tolist()
        del run, watch  # the whole cache and the watched queries go before anything else is run
    if after is None:
        return Prefilled(cache, tokens_BS, n_B, step, full_bytes, kept_rows, 1, keep)
    ids_BT, m_B = pad(after, device)
    pos_BT = n_B[:, None] + torch.arange(ids_BT.shape[1], device=device)
    then, steps = read_after(target, cache, ids_BT, tuple(map(len, after)), hidden=hidden, watch=looking)
    tokens_BS = _appended(tokens_BS, ids_BT, pos_BT)
    joined = {layer: _appended(step.hidden[layer], then.hidden[layer], pos_BT) for layer in hidden}
    last = TargetStep(then.logits_BTV, joined)
    return Prefilled(cache, tokens_BS, n_B + m_B, last, full_bytes, kept_rows, 1 + steps, keep)


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists padded on the right with id 0, and their lengths."""
    longest = max(map(len, rows))
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)


def _both(one: Watch | None, other: Watch | None) -> Watch | None:
    """A watch that is two."""
    return one or other if one is None or other is None else _Both((one, other))


class _Both:
    """Shows everything to two watches, what attention reads to those that want it."""

    def __init__(self, watches: tuple[Watch, Watch]) -> None:
        self._watches = watches
        looks = [getattr(watch, "see_inputs", None) for watch in watches]
        self._looks: list[Inputs] = [look for look in looks if look is not None]

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See one layer."""
        for watch in self._watches:
            watch(layer, q_BHTD, k_BGTD, v_BGTD)

    def see_inputs(self, layer: int, x_BTE: Tensor) -> None:
        """See what one layer's attention reads."""
        for look in self._looks:
            look(layer, x_BTE)


def _appended(first_BSx: Tensor, then_BTx: Tensor, pos_BT: Tensor) -> Tensor:
    """Rows of the second at their positions behind those of the first."""
    B, T = pos_BT.shape
    whole = torch.cat((first_BSx, first_BSx.new_zeros(B, T, *first_BSx.shape[2:])), 1)
    whole[torch.arange(B, device=pos_BT.device)[:, None], pos_BT] = then_BTx
    return whole
