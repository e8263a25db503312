"""A cache that evicts during decoding: entries are scored as they are written, and the best remain.

The newest entries of a sequence are in a dense tail, the others in a prefix, whose size differs between
layers and KV heads. Whenever the tail has `stride` entries more than the window, the oldest of them compete
with the prefix for its budget. That happens at the same positions with any number of tokens per step
(`commit_limit`), so speculation gives the text of plain decoding.

Shapes: L layers, B batch, T new tokens, P path, G KV heads, D head dim, E hidden dim, K entries of the
prefix, M entries that leave the tail, S = K + M, C capacity of the tail, X = B * G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import EvictedCache, Kept, Prefix, end_to_end, prefix_of


@dataclass(frozen=True)
class Rule:
    """Scoring and selection of entries during decoding.

    Args:
        score: (layer, the input x_BTE of its attention) -> s_BGT.
        keep: (s_LBGS, for each sequence the entries per head on average, or None: all) -> the entries that
            remain. +inf always remains, -inf never; each head keeps at least one entry.
        rows: number of tokens -> number of entries of each layer and KV head, the window included.
        stride: number of entries that are scored against the prefix together.
    """

    score: Callable[[int, Tensor], Tensor]
    keep: Callable[[Tensor, Sequence[int | None]], Kept]
    rows: Callable[[int], int]
    stride: int


class ThinningCache(EvictedCache):
    """An evicted cache that is thinned again during decoding.

    Args:
        cache: prompts, committed, nothing after them.
        keep: the prompts' entries that remain: the window's in every layer and head, and one before it.
        s_LBGS: scores of the prompts' entries; +inf for an entry that always remains.
        lengths: tokens of each prompt, on the host.
        windows: number of newest entries of each sequence that always remain.
        rule: scoring and selection.
        nodes: most tokens of a step beyond a stride.
    """

    def __init__(
        self,
        cache: DenseCache,
        keep: Kept,
        s_LBGS: Tensor,
        *,
        lengths: Sequence[int],
        windows: Sequence[int],
        rule: Rule,
        nodes: int,
    ) -> None:
        L, B, G, _, _ = cache.k_LBGSD.shape
        self._rule, self._windows = rule, list(windows)
        recent = [min(window, length - 1) for window, length in zip(windows, lengths, strict=True)]
        most = max(windows) + 2 * rule.stride
        tail = DenseCache(n_layers=L, max_tokens=most, max_nodes=nodes, **cache.sizes)
        device = cache.len_B.device
        idx_LBGK = keep.idx_LBGK.to(device)
        n_LBG = keep.n_LBG - torch.tensor(recent)[:, None]
        prefixes = [prefix_of(cache, layer, idx_LBGK[layer], n_LBG[layer]) for layer in range(L)]
        self._tail_LBGC = s_LBGS.new_zeros(L, B, G, tail.capacity)
        for b, (length, count) in enumerate(zip(lengths, recent, strict=True)):
            newest = slice(length - count, length)
            for own, other in ((tail.k_LBGSD, cache.k_LBGSD), (tail.v_LBGSD, cache.v_LBGSD)):
                own[:, b, :, :count] = other[:, b, :, newest]
            self._tail_LBGC[:, b, :, :count] = s_LBGS[:, b, :, newest]
        tail.rewind(recent)
        super().__init__(tail, prefixes, lengths, keep.n_LBG)
        self._old_LBGK = _ordered(s_LBGS, idx_LBGK, n_LBG)
        self._held_LBG = n_LBG
        self._fresh: dict[int, Tensor] = {}
        self._rows = [window + rule.stride for window in windows]
        self._room = min(full - count for full, count in zip(self._rows, recent, strict=True))
        """Number of tokens that can be committed before any tail can be full."""

    def see_inputs(self, layer: int, x_BTE: Tensor) -> None:
        """Score the tokens of a step (hook of `targets.attention.AttentionHook`)."""
        self._fresh[layer] = self._rule.score(layer, x_BTE)

    def commit_limit(self) -> Tensor:
        """See `KVCache`: until the tail is full."""
        return torch.tensor(self._rows).to(self.len_B.device, non_blocking=True) - self.tail.len_B

    def room_left(self) -> int | None:
        """See `KVCache`: no limit."""
        return None

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`; then evicts in the sequences whose tail is full."""
        s_LBGT = torch.stack([self._fresh[layer] for layer in range(len(self._fresh))])
        L, B, G, T = s_LBGT.shape
        if path_BP is not None:
            s_LBGT = s_LBGT.gather(3, path_BP[None, :, None].expand(L, B, G, -1))
            T = path_BP.shape[1]
        last = self._tail_LBGC.shape[3] - 1
        slot_BT = (self.tail.len_B[:, None] + torch.arange(T, device=self.len_B.device)).clamp(max=last)
        at_LBGT = slot_BT[None, :, None].expand(L, B, G, T)
        self._tail_LBGC.scatter_(3, at_LBGT, s_LBGT.to(self._tail_LBGC.dtype))
        super().commit(path_BP, n_B)
        self._room -= T
        if self._room <= 0:
            self._thin()

    def bytes(self) -> int:
        """See `EvictedCache`; counts the scores too."""
        return super().bytes() + self._tail_LBGC.nbytes + self._old_LBGK.nbytes

    def _thin(self) -> None:
        """Evict among the entries that left the window, in sequences whose tail is full; synchronises."""
        held = self.tail.len_B.tolist()
        leaving = [
            count - window if count >= full else 0
            for count, window, full in zip(held, self._windows, self._rows, strict=True)
        ]
        left = [count - gone for count, gone in zip(held, leaving, strict=True)]
        if any(leaving):
            start = self._start_B.tolist()
            lengths = [first + count for first, count in zip(start, held, strict=True)]
            self._join(leaving, lengths)
            self._shift(leaving, left)
        self._room = min(full - count for full, count in zip(self._rows, left, strict=True))

    def _join(self, leaving: Sequence[int], lengths: Sequence[int]) -> None:
        """Select among the prefix and the tail's oldest entries together."""
        most, K = max(leaving), self._old_LBGK.shape[3]
        device = self.len_B.device
        slot_M = torch.arange(most, device=device)
        gone_BM = slot_M < torch.tensor(leaving, device=device)[:, None]
        new_LBGM = self._tail_LBGC[..., :most].masked_fill(~gone_BM[None, :, None], -torch.inf)
        s_LBGS = torch.cat((self._old_LBGK, new_LBGM), 3)
        quota = [
            max(1, self._rule.rows(length) - window) if gone else None
            for length, window, gone in zip(lengths, self._windows, leaving, strict=True)
        ]
        keep = self._rule.keep(s_LBGS, quota)
        idx_LBGK = keep.idx_LBGK
        for layer, prefix in enumerate(self.prefixes or []):
            self.prefixes[layer] = self._gathered(prefix, layer, K, idx_LBGK[layer], keep.n_LBG[layer])  # type: ignore[index]
        self._old_LBGK, self._held_LBG = _ordered(s_LBGS, idx_LBGK, keep.n_LBG), keep.n_LBG

    def _gathered(self, prefix: Prefix, layer: int, K: int, idx_BGK: Tensor, n_BG: Tensor) -> Prefix:
        """The entries of one layer that remain, gathered from its prefix and its tail."""
        segments, owner_N, slot_N = end_to_end(idx_BGK, n_BG)
        before_X = self._held_LBG[layer].flatten().to(idx_BGK.device)
        start_X = before_X.cumsum(0) - before_X
        capacity = self.tail.k_LBGSD.shape[3]
        # index into the prefix's entries followed by those of the tail, flattened over [B, G, C]
        in_tail_N = len(prefix.k_ND) + owner_N * capacity + slot_N - K
        place_N = torch.where(slot_N < K, start_X[owner_N] + slot_N, in_tail_N)
        k_ND, v_ND = (
            torch.cat((own, rest[layer].flatten(0, 2)))[place_N]
            for own, rest in ((prefix.k_ND, self.tail.k_LBGSD), (prefix.v_ND, self.tail.v_LBGSD))
        )
        return Prefix(k_ND, v_ND, None if int(n_BG.min()) == int(n_BG.max()) else segments)

    def _shift(self, leaving: Sequence[int], left: Sequence[int]) -> None:
        """Move the tail's remaining entries to its start."""
        for b, (gone, count) in enumerate(zip(leaving, left, strict=True)):
            if gone:
                for buffer in (self.tail.k_LBGSD, self.tail.v_LBGSD):
                    buffer[:, b, :, :count] = buffer[:, b, :, gone : gone + count].clone()
                self._tail_LBGC[:, b, :, :count] = self._tail_LBGC[:, b, :, gone : gone + count].clone()
        self.tail.rewind(left)
        self._start_B = self._start_B + torch.tensor(leaving).to(self._start_B.device, non_blocking=True)


def _ordered(s_LBGS: Tensor, idx_LBGK: Tensor, n_LBG: Tensor) -> Tensor:
    """Scores of the kept entries in order, -inf after them."""
    K = int(n_LBG.max())
    s_LBGK = s_LBGS.gather(3, idx_LBGK[..., :K])
    inside = torch.arange(K, device=s_LBGS.device) < n_LBG[..., None].to(s_LBGS.device)
    return s_LBGK.masked_fill(~inside, -torch.inf)
