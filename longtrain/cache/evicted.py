"""A cache after eviction: of the prompt only the rows that were kept, and a dense tail for what follows.

Shapes: L layers, B batch, T new rows, G KV heads, H query heads, D head dim, K kept rows of a sequence and
head, N kept rows of a layer, X = B * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.errors import ConfigError, ConflictError, refusal
from longtrain.kernels.attention.ragged import Segments, even_attention, ragged_attention, segments_of
from longtrain.kernels.attention.split import lse_merge


class Kept(Protocol):
    """Which rows stay (`decoding.evict.Keep`)."""

    @property
    def idx_LBGK(self) -> Tensor:  # noqa: N802
        """Positions, ascending over the first `n`."""

    @property
    def n_LBG(self) -> Tensor:  # noqa: N802
        """How many, on the host."""


@dataclass(frozen=True)
class Prefix:
    """The kept rows of one layer, segment after segment (sequence by sequence, KV head by KV head).

    Args:
        k_ND: keys, as they were stored: with the rotary angles of their own positions.
        v_ND: values.
        segments: the places of each sequence's and head's rows; None where all have as many.
    """

    k_ND: Tensor
    v_ND: Tensor
    segments: Segments | None


class EvictedCache(KVCache):
    """What `compact` leaves. `len_B` goes on counting positions, not rows.

    Where every layer, sequence and head kept as many rows, they lie in one buffer with the tail and are
    attended like any cache. Otherwise each layer has its rows end to end, no slot wasted, and attention over
    them is merged with that over the tail by lse.

    Args:
        tail: holds what comes after the prompt; its `base` slots are the kept rows where these are even.
        prefixes: kept rows of each layer; None where they are in the tail's buffer.
        lengths: tokens of each prompt, on the host.
        n_LBG: rows kept, on the host.
    """

    def __init__(
        self, tail: DenseCache, prefixes: list[Prefix] | None, lengths: Sequence[int], n_LBG: Tensor
    ) -> None:
        self.tail, self.prefixes, self.n_LBG = tail, prefixes, n_LBG
        self.lengths = tuple(lengths)
        self._start_B = torch.tensor(lengths).to(tail.len_B.device, non_blocking=True)
        self.len_B = self._start_B + tail.len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail rows of a layer, over whatever tail was there.

        Raises:
            ConfigError: they do not fit in the room that `compact` was given.
        """
        self.tail.write(layer, k_BGTD, v_BGTD)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention over kept rows, committed tail and new rows."""
        if self.prefixes is None:
            return self.tail.attend(layer, q_BHTD, mask=mask, scale=scale)
        prefix = self.prefixes[layer]
        B, H, T, D = q_BHTD.shape
        G = self.tail.k_LBGSD.shape[2]
        q_BGRD = q_BHTD.reshape(B, G, (H // G) * T, D)
        if prefix.segments is None:
            k_BGKD, v_BGKD = (x.view(B, G, -1, D) for x in (prefix.k_ND, prefix.v_ND))
            far, far_lse = even_attention(q_BGRD, k_BGKD, v_BGKD, scale=scale)
        else:
            far, far_lse = ragged_attention(q_BGRD, prefix.k_ND, prefix.v_ND, prefix.segments, scale=scale)
        near, near_lse = self.tail.attend_lse(layer, q_BHTD, mask=mask, scale=scale)
        out, lse = lse_merge(far.reshape(B, H, T, D), far_lse.reshape(B, H, T), near, near_lse)
        return out.to(q_BHTD.dtype), lse

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`."""
        self.tail.commit(path_BP, n_B)
        self.len_B = self._start_B + self.tail.len_B

    def rows_left(self) -> int | None:
        """See `KVCache`."""
        return self.tail.rows_left()

    def bytes(self) -> int:
        """Bytes of kept rows, their index, the tail with its room, and lengths."""
        held = self.tail.bytes() + self.len_B.nbytes + self._start_B.nbytes
        for prefix in self.prefixes or []:
            held += prefix.k_ND.nbytes + prefix.v_ND.nbytes
            if prefix.segments is not None:
                held += sum(x.nbytes for x in vars(prefix.segments).values() if isinstance(x, Tensor))
        return held


def compact(cache: DenseCache, keep: Kept, lengths: Sequence[int], *, room: int) -> EvictedCache:
    """A copy of the prompts' cache with the kept rows alone; the caller lets go of the whole one.

    Args:
        cache: prompts, committed, nothing after them.
        keep: which rows stay, at least one of each layer, sequence and KV head.
        lengths: tokens of each prompt, on the host.
        room: rows of the tail: what will be committed after the prompt, and the nodes of one step.

    Raises:
        ConfigError: `keep` does not fit the cache: its shape, no row, or more rows than a prompt has.
        ConflictError: the cache is of another kind, whose rows cannot be picked.
    """
    if not isinstance(cache, DenseCache):
        raise ConflictError(
            f"rows of a {type(cache).__name__} cannot be evicted; use a plain cache, or leave eviction out"
        )
    n_LBG, device = keep.n_LBG, cache.len_B.device
    L, B, G, _, D = cache.k_LBGSD.shape
    if n_LBG.shape != (L, B, G) or len(lengths) != B:
        raise ConfigError(
            f"rows to keep for [layers, sequences, KV heads] = {list(n_LBG.shape)} and {len(lengths)} "
            f"prompts; the cache has {[L, B, G]}"
        )
    most_B = torch.tensor(lengths)
    if int(n_LBG.min()) < 1 or bool((n_LBG > most_B[:, None]).any()):
        raise refusal(
            ConfigError,
            f"{int(n_LBG.min())} to {int(n_LBG.max())} rows kept of prompts of {list(lengths)} tokens",
            "1 to the prompt's length in every layer and KV head",
        )
    even = int(n_LBG.min()) == int(n_LBG.max())
    base = int(n_LBG.max()) if even else 0
    tail = DenseCache(
        n_layers=L,
        n_kv_heads=G,
        head_dim=D,
        batch=B,
        max_tokens=room,
        max_nodes=0,
        device=device,
        dtype=cache.k_LBGSD.dtype,
        base=base,
    )
    idx_LBGK = keep.idx_LBGK.to(device, non_blocking=True)
    if even:
        idx = idx_LBGK[..., :base, None].expand(-1, -1, -1, -1, D)
        tail.k_LBGSD[..., :base, :] = cache.k_LBGSD.gather(3, idx)
        tail.v_LBGSD[..., :base, :] = cache.v_LBGSD.gather(3, idx)
        return EvictedCache(tail, None, lengths, n_LBG)
    prefixes = [prefix_of(cache, layer, idx_LBGK[layer], n_LBG[layer]) for layer in range(L)]
    return EvictedCache(tail, prefixes, lengths, n_LBG)


def prefix_of(cache: DenseCache, layer: int, idx_BGK: Tensor, n_BG: Tensor) -> Prefix:
    """The kept rows of one layer, gathered."""
    counts, device = n_BG.flatten().tolist(), idx_BGK.device
    segments = segments_of(counts, device)
    count_X = segments.count_X
    owner_N = torch.repeat_interleave(
        torch.arange(len(counts), device=device), count_X, output_size=sum(counts)
    )
    nth_N = torch.arange(len(owner_N), device=device) - segments.start_X[owner_N]
    slot_N = idx_BGK.flatten(0, 1)[owner_N, nth_N]
    k_ND, v_ND = (x[layer].flatten(0, 1)[owner_N, slot_N] for x in (cache.k_LBGSD, cache.v_LBGSD))
    return Prefix(k_ND, v_ND, segments if min(counts) < max(counts) else None)
