"""A cache after eviction: the kept entries of the prompt, and a dense tail for the tokens after it.

Shapes: L layers, B batch, T new tokens, G KV heads, H query heads, D head dim, K kept entries of a sequence
and head, N kept entries of a layer, X = B * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.layered import LayeredCache, last_entries
from longtrain.errors import ConflictError
from longtrain.kernels.attention.ragged import Segments, even_attention, ragged_attention, segments_of
from longtrain.kernels.attention.split import lse_merge


class Kept(Protocol):
    """The entries that remain (`decoding.evict.Keep`)."""

    @property
    def idx_LBGK(self) -> Tensor:  # noqa: N802
        """Positions, ascending over the first `n`."""

    @property
    def n_LBG(self) -> Tensor:  # noqa: N802
        """Number of entries, on the host."""


@dataclass(frozen=True)
class Prefix:
    """The kept entries of one layer, end to end (sequence by sequence, KV head by KV head).

    Args:
        k_ND: keys, with the rotary angles of their original positions.
        v_ND: values.
        segments: the range of each sequence and head; None if all have the same number of entries.
    """

    k_ND: Tensor
    v_ND: Tensor
    segments: Segments | None


class EvictedCache(KVCache):
    """The result of `compact`. `len_B` counts positions, not entries.

    If every layer, sequence and head has the same number of entries, they are in one buffer with the tail,
    and attention runs as over any cache. Otherwise each layer's entries are stored end to end without
    padding, and attention over them is merged with that over the tail by lse.

    Args:
        tail: cache of the tokens after the prompt; if even, of the kept entries and these tokens.
        prefixes: kept entries of each layer; None if they are in the tail's buffer.
        lengths: tokens of each prompt, on the host.
        n_LBG: number of kept entries, on the host.
    """

    def __init__(
        self, tail: DenseCache, prefixes: list[Prefix] | None, lengths: Sequence[int], n_LBG: Tensor
    ) -> None:
        self.tail, self.prefixes, self.n_LBG = tail, prefixes, n_LBG
        self.len_B = torch.tensor(lengths).to(tail.len_B.device, non_blocking=True)
        self._start_B = self.len_B - tail.len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `KVCache`; the tail is put into the room that `compact` was given."""
        self.tail.write(layer, k_BGTD, v_BGTD)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention over kept entries, committed tail and new tokens."""
        if self.prefixes is None:
            return self.tail.attend(layer, q_BHTD, mask=mask, scale=scale)
        return self.attend_lse(layer, q_BHTD, mask=mask, scale=scale)

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        if self.prefixes is None or window:
            return self.tail.attend_lse(layer, q_BHTD, mask=mask, scale=scale, window=window)
        prefix = self.prefixes[layer]
        B, H, T, D = q_BHTD.shape
        G = self.tail.k_LBGSD.shape[2]
        q_BGRD = q_BHTD.reshape(B, G, (H // G) * T, D)  # [B, H, T, D] -> [B, G, R, D]: a GQA group as rows
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

    def room_left(self) -> int | None:
        """See `KVCache`."""
        return self.tail.room_left()

    def bytes(self) -> int:
        """Bytes of kept entries, their index, the tail with its free room, and lengths."""
        held = self.tail.bytes() + self.len_B.nbytes + self._start_B.nbytes
        for prefix in self.prefixes or []:
            held += prefix.k_ND.nbytes + prefix.v_ND.nbytes
            if prefix.segments is not None:
                held += sum(x.nbytes for x in vars(prefix.segments).values() if isinstance(x, Tensor))
        return held


def compact(
    cache: DenseCache, keep: Kept, lengths: Sequence[int], *, room: int, nodes: int | None = None
) -> EvictedCache | LayeredCache:
    """Copy the kept entries of the prompts' cache to a smaller one; the caller drops the original.

    Args:
        cache: committed prompts, with nothing after them.
        keep: entries that remain, at least one of each layer, sequence and KV head; of the layers with a
            sliding window it has none: they keep what later tokens see.
        lengths: tokens of each prompt, on the host.
        room: capacity of the tail: tokens committed after the prompt, and the nodes of one step.
        nodes: those nodes, see `last_entries`.

    Raises:
        ConflictError: the cache is of a kind whose entries cannot be selected.
    """
    if not isinstance(cache, DenseCache):
        raise ConflictError(
            f"entries of a {type(cache).__name__} cannot be evicted; use a plain cache, or leave eviction out"
        )
    n_LBG, device = keep.n_LBG, cache.len_B.device
    _, B, _, _, D = cache.k_LBGSD.shape
    layers = [layer for layer, window in enumerate(cache.windows) if not window]
    L = len(layers)
    even = int(n_LBG.min()) == int(n_LBG.max())
    most = int(n_LBG.max()) if even else 0
    tail = DenseCache(n_layers=L, max_tokens=most + room, max_nodes=0, **cache.sizes)
    idx_LBGK = keep.idx_LBGK.to(device, non_blocking=True)
    prefixes = None
    if even:
        tail.rewind([most] * B)
        idx_LBGKD = idx_LBGK[..., :most, None].expand(-1, -1, -1, -1, D)
        for at, layer in enumerate(layers):
            tail.k_LBGSD[at, :, :, :most] = cache.k_LBGSD[layer].gather(2, idx_LBGKD[at])
            tail.v_LBGSD[at, :, :, :most] = cache.v_LBGSD[layer].gather(2, idx_LBGKD[at])
    else:
        prefixes = [prefix_of(cache, one, idx_LBGK[at], n_LBG[at]) for at, one in enumerate(layers)]
    evicted = EvictedCache(tail, prefixes, lengths, n_LBG)
    if len(cache.windows) == L:
        return evicted
    near = [layer for layer, window in enumerate(cache.windows) if window]
    return LayeredCache(evicted, last_entries(cache, near, lengths, room=room, nodes=nodes), cache.windows)


def prefix_of(cache: DenseCache, layer: int, idx_BGK: Tensor, n_BG: Tensor) -> Prefix:
    """The kept entries of one layer, gathered."""
    segments, owner_N, slot_N = end_to_end(idx_BGK, n_BG)
    k_ND, v_ND = (x[layer].flatten(0, 1)[owner_N, slot_N] for x in (cache.k_LBGSD, cache.v_LBGSD))
    return Prefix(k_ND, v_ND, None if int(n_BG.min()) == int(n_BG.max()) else segments)


def end_to_end(idx_BGK: Tensor, n_BG: Tensor) -> tuple[Segments, Tensor, Tensor]:
    """Concatenate the kept entries of one layer, segment after segment.

    Args:
        idx_BGK: positions, the first `n_BG` of each sequence and KV head.
        n_BG: their number, on the host.

    Returns:
        the segments, and for each entry its sequence and head (as b * G + g) and its position, int64_N.
    """
    counts, device = n_BG.flatten().tolist(), idx_BGK.device
    segments = segments_of(counts, device)
    owner_N = torch.repeat_interleave(
        torch.arange(len(counts), device=device), segments.count_X, output_size=sum(counts)
    )
    nth_N = torch.arange(len(owner_N), device=device) - segments.start_X[owner_N]
    return segments, owner_N, idx_BGK.flatten(0, 1)[owner_N, nth_N]
