"""A plain KV cache: every position in the model's own dtype, in static buffers.

Shapes: L layers, B batch, T new tokens, S cache positions, N tree nodes, P path, H query heads, G KV heads, D
head dim, R = T * H / G packed rows (the queries of one KV head), Q = B * T new tokens end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.cache.base import Causal, KVCache, Mask, PrefixOnly, Tree, depths
from longtrain.cache.room import check_room
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.attention.packed import packed_attention, packed_lse
from longtrain.kernels.attention.ragged import masked_rows
from longtrain.kernels.attention.segments import by_sequence, end_to_end
from longtrain.kernels.attention.split import split_attention, split_serves
from longtrain.kernels.tree_attention import CAUSAL, kernel_serves, tree_attention

_SLACK = 64
"""Largest drift of the host's bound on lengths before the exact lengths are read from the device."""

_MIN_PREFIX, _MAX_REST = 512, 1024
"""Attention is split where all sequences share at least so long a prefix and differ by at most so much."""

_MANY = 128
"""New tokens from which on a causal step attends each sequence by itself, if the host knows all lengths."""


class DenseCache(KVCache):
    """Buffer position s has the s-th stored entry of a sequence; the tail follows after `rows_B[b]`.

    All positions are stored, so that `rows_B` is `len_B` (`cache.window` stores the last ones only). Lengths
    are on the device and differ between sequences. The host has bounds only, so that a decoding step does not
    wait for the device: `_low` <= every number of stored entries <= `_high`.

    Args:
        n_layers: number of layers.
        n_kv_heads: number of KV heads of each layer.
        head_dim: size of a head.
        batch: number of sequences.
        max_tokens: most committed positions of a sequence.
        max_nodes: most tail entries of a step once `max_tokens` are committed.
        device: device of the buffers.
        dtype: dtype of the buffers.
        windows: window of each layer, 0 for one that sees the whole text; empty: no layer has one.

    Raises:
        NoRoomError: there is too little memory.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        batch: int,
        max_tokens: int,
        max_nodes: int,
        device: torch.device | str,
        dtype: torch.dtype,
        windows: Sequence[int] = (),
    ) -> None:
        self.capacity = self.limit = max_tokens + max_nodes
        """Entries of a sequence that fit, and positions that it may have."""
        self.windows = tuple(windows) or (0,) * n_layers
        shape = (n_layers, batch, n_kv_heads, self.capacity, head_dim)
        needed = 2 * dtype.itemsize * n_layers * batch * n_kv_heads * shape[3] * head_dim
        less = "shorten the prompts, lower decode.max_new_tokens or the batch, or halve it: method=quantspec"
        check_room(needed, device, what="a KV cache", batch=batch, tokens=shape[3], remedy=less)
        # Zeros, not empty: a masked position has weight 0, and 0 times garbage may be NaN.
        self.k_LBGSD = torch.zeros(shape, device=device, dtype=dtype)
        self.v_LBGSD = torch.zeros(shape, device=device, dtype=dtype)
        self.len_B = torch.zeros(batch, device=device, dtype=torch.int64)
        self._row_B = torch.arange(batch, device=device)
        self._at: tuple[Tensor, Tensor] | None = None
        """Entry at which each KV head begins in a layer's buffer of all heads, and its number of entries,
        int64_BG, if these are some sequences of another cache (`some`)."""
        self._low = self._high = self._synced_high = 0
        self._known: tuple[int, ...] | None = None
        """Stored entries of each sequence if the host was told (`rewind`) and nothing was committed since."""
        self._tail = 0
        self._slots_BT: Tensor | None = None
        self._visible: dict[int, tuple[Mask, int, int, int, Tensor]] = {}
        """Window, or 0 -> the last mask of its layers, and what it was made for."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments that caches beside this one have in common with it: all but layers and lengths."""
        _, B, G, _, D = self.k_LBGSD.shape
        like = {"device": self.k_LBGSD.device, "dtype": self.k_LBGSD.dtype}
        return {"n_kv_heads": G, "head_dim": D, "batch": B, **like}

    @property
    def rows_B(self) -> Tensor:  # noqa: N802
        """Stored committed entries of each sequence."""
        return self.len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail entries of a layer after the committed ones, overwriting any earlier tail."""
        T = k_BGTD.shape[2]
        self._tail = T
        self._tighten(T)
        if self._high == 0 and self._at is None:
            self.k_LBGSD[layer, :, :, :T] = k_BGTD
            self.v_LBGSD[layer, :, :, :T] = v_BGTD
            return
        at = (self._row_B[:, None], slice(None), self._slots(T))
        self.k_LBGSD[layer][at] = k_BGTD.transpose(1, 2)
        self.v_LBGSD[layer][at] = v_BGTD.transpose(1, 2)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention over prefix and tail; a token that sees nothing gives zeros.

        On a CPU the lse is None unless the mask asks for it.
        """
        T = q_BHTD.shape[2]
        if isinstance(mask, Causal) and self._high == 0 and T > 1:
            k, v = self._stored(layer, T)
            return scaled_dot_product_attention(
                q_BHTD, k, v, is_causal=True, scale=scale, enable_gqa=True
            ), None
        if self._each_serves(mask, T):
            return self._attend_each(layer, q_BHTD, scale)
        if self._at is not None and isinstance(mask, Causal):
            first_BG, len_BG = self._at
            k_BGND, v_BGND = (
                buffer[layer].flatten(0, 2).expand(*len_BG.shape, -1, -1)
                for buffer in (self.k_LBGSD, self.v_LBGSD)
            )
            if kernel_serves(q_BHTD, k_BGND, v_BGND):
                return tree_attention(q_BHTD, k_BGND, v_BGND, len_BG, CAUSAL, scale=scale, first_BG=first_BG)
        with_lse = isinstance(mask, PrefixOnly) and mask.lse
        out, lse = self._attend(layer, q_BHTD, mask, scale, with_lse=with_lse)
        if isinstance(mask, PrefixOnly):
            out = torch.where(self.len_B.view(-1, 1, 1, 1) > 0, out, 0.0)
        return out, lse

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`. Stored entries before a token's window are masked.

        Raises:
            ConflictError: a mask without the new tokens.
        """
        self._check_window(layer, mask, window)
        if self._each_serves(mask, q_BHTD.shape[2]):
            return self._attend_each(layer, q_BHTD, scale, window=window - 1)
        return self._attend(layer, q_BHTD, mask, scale, with_lse=False, window=window)

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        self._check_window(layer, mask, window)
        T = q_BHTD.shape[2]
        if T >= _MANY and self._each_serves(mask, T):  # for fewer one pass under a mask gives both
            before = window - 1 if window else None
            out, lse = self._attend_each(layer, q_BHTD, scale, window=before, with_lse=True)
        else:
            out, lse = self._attend(layer, q_BHTD, mask, scale, with_lse=True, window=window)
        assert lse is not None
        return out, lse

    def _check_window(self, layer: int, mask: Mask, window: int) -> None:
        if window and isinstance(mask, PrefixOnly):
            raise ConflictError(
                f"layer {layer} has a sliding window of {window} tokens: positions of its entries and of the "
                "new tokens are needed; read a layer that sees the whole text"
            )

    def _each_serves(self, mask: Mask, T: int) -> bool:
        """True if `_attend_each` serves a step of T new tokens."""
        begins = self._high == 0 and T > 1
        return isinstance(mask, Causal) and (begins or (self._known is not None and T >= _MANY))

    def _attend_each(
        self, layer: int, q_BHTD: Tensor, scale: float, *, window: int | None = None, with_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Causal attention of many new tokens, without a mask of new tokens x stored entries.

        A sequence's prefix and new tokens are adjacent in the buffer; they are copied to one segment.
        """
        B, _, T, _ = q_BHTD.shape
        known_B = self._known if self._high else None
        used_B = [n + T for n in known_B or [0] * B]
        k_SGD, v_SGD = (
            torch.cat([x_GCD[:, :n].transpose(0, 1) for x_GCD, n in zip(x_BGCD, used_B, strict=True)])
            for x_BGCD in self._stored(layer, max(used_B))
        )
        bounds, k_bounds = range(0, (B + 1) * T, T), list(accumulate(used_B, initial=0))
        q_QHD, lse_BHT = end_to_end(q_BHTD), None
        out_QHD = packed_attention(q_QHD, k_SGD, v_SGD, bounds, k_bounds, scale=scale, window=window)
        if with_lse:
            lse_QH = packed_lse(q_QHD, k_SGD, bounds, k_bounds, scale=scale, window=window)
            lse_BHT = by_sequence(lse_QH, B)
        return by_sequence(out_QHD, B), lse_BHT

    def _attend(
        self, layer: int, q_BHTD: Tensor, mask: Mask, scale: float, *, with_lse: bool, window: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with the query heads of a KV head packed into one matrix, so K and V are read once.

        With a window, positions that no token of the batch sees are not read.
        """
        B, H, T, D = q_BHTD.shape
        low, used = self._low, self._high
        used += 0 if isinstance(mask, PrefixOnly) else T
        if used == 0:
            wide = torch.promote_types(q_BHTD.dtype, torch.float32)
            return torch.zeros_like(q_BHTD), q_BHTD.new_full((B, H, T), -torch.inf, dtype=wide)
        k, v = self._stored(layer, used)
        G = k.shape[1]
        q_BGRD = q_BHTD.reshape(B, G, (H // G) * T, D)  # [B, H, T, D] -> [B, G, R, D]: a GQA group as rows
        split = low >= _MIN_PREFIX and 0 < used - low <= _MAX_REST and not window and split_serves(q_BGRD)
        start = low if split else 0
        if window:
            start = max(0, low - window + 1)
            k, v = k[:, :, start:], v[:, :, start:]
        visible_B1RC = self._visible_rows(mask, T, start, used, H // G, window)
        if split:
            out, lse = split_attention(q_BGRD, k, v, start, visible_B1RC, scale=scale)
        elif with_lse:
            out, lse = masked_rows(q_BGRD, k, v, visible_B1RC, scale=scale)
        else:
            out = scaled_dot_product_attention(q_BGRD, k, v, attn_mask=visible_B1RC, scale=scale)
            return out.reshape(B, H, T, D), None
        return out.reshape(B, H, T, D), lse.reshape(B, H, T)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Accept tail entries. Entries that are not accepted stay beyond the length and are overwritten.

        Args:
            path_BP: indices of the accepted tail entries in order, int64; None: entries 0..n_B[b]-1, which
                are already in place.
            n_B: number of accepted entries, int64; 0 leaves a sequence unchanged.
        """
        if path_BP is not None:
            rows_B1 = self._row_B[:, None]
            first_B1 = self.rows_B[:, None]
            source_BP = first_B1 + path_BP
            goal_BP = first_B1 + torch.arange(path_BP.shape[1], device=path_BP.device)
            for buffer in (self.k_LBGSD, self.v_LBGSD):
                buffer[:, rows_B1, :, goal_BP] = buffer[:, rows_B1, :, source_BP]
        self._high += self._tail if path_BP is None else path_BP.shape[1]
        self._known = None
        self.len_B = self.len_B + n_B
        if self._at is not None:
            self._at = self._at[0], self._at[1] + n_B[:, None]
        self._slots_BT = None
        self._visible.clear()

    @property
    def used(self) -> int:
        """Upper bound of the committed buffer positions, known on the host."""
        return self._high

    def room_left(self) -> int:
        """See `KVCache`."""
        return self.limit - self._high

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's K and V as views [B, C, G, D] of all C positions; undefined from `len_B[b]` on."""
        return self.k_LBGSD[layer].transpose(1, 2), self.v_LBGSD[layer].transpose(1, 2)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Drop entries committed beyond `lengths` (on the host, none above the present one)."""
        len_B = torch.tensor(lengths, dtype=torch.int64).to(self.len_B.device, non_blocking=True)
        self._counted(len_B, lengths)

    def _counted(self, len_B: Tensor, lengths: Sequence[int]) -> None:
        """Set the number of committed entries of each sequence, on the device and on the host."""
        self.len_B = len_B
        self._low, self._high = min(lengths), max(lengths)
        self._synced_high = self._high
        self._known = tuple(lengths)
        self._slots_BT = None
        self._visible.clear()

    def some(self, row_N: Tensor, len_N: Tensor, lengths: Sequence[int]) -> DenseCache:
        """Some of the sequences as a cache of their own over the same buffers, each with its first entries.

        Not of a cache that drops entries. The new cache writes to the buffers and changes nothing else here.

        Args:
            row_N: the sequences, int64 on the device, none twice.
            len_N: number of entries of each that are committed in the new cache, likewise.
            lengths: the same numbers on the host.
        """
        _, _, G, S, _ = self.k_LBGSD.shape
        head_G = torch.arange(G, device=row_N.device)
        some = copy(self)
        some._row_B, some._visible = row_N, {}
        some._at = (row_N[:, None] * G + head_G) * S, len_N[:, None].repeat(1, G)
        some._counted(len_N, lengths)
        return some

    def _stored(self, layer: int, used: int) -> tuple[Tensor, Tensor]:
        """A layer's K and V at the first `used` buffer positions, each [B, G, used, D]."""
        k_BGSD, v_BGSD = self.k_LBGSD[layer, :, :, :used], self.v_LBGSD[layer, :, :, :used]
        return (k_BGSD, v_BGSD) if self._at is None else (k_BGSD[self._row_B], v_BGSD[self._row_B])

    def bytes(self) -> int:
        """Bytes of K, V and lengths."""
        return self.k_LBGSD.nbytes + self.v_LBGSD.nbytes + self.len_B.nbytes

    def _tighten(self, T: int) -> None:
        """Read exact lengths if the host's bounds drifted or seem to overflow; check that T entries fit."""
        if self._high - self._synced_high > _SLACK or self._high + T > self.capacity:
            self._low, self._high = torch.stack(torch.aminmax(self.rows_B)).tolist()
            self._synced_high = self._high
        if self._high + T > self.capacity:
            raise ConfigError(
                f"cache is full: {self._high} tokens committed and {T} new tokens, room for {self.capacity}; "
                "raise the engine's limits (tokens, nodes) or shorten the prompt"
            )

    def _slots(self, T: int) -> Tensor:
        """Buffer positions [B, T] of the tail, computed once per step."""
        if self._slots_BT is None or self._slots_BT.shape[1] != T:
            self._slots_BT = self.rows_B[:, None] + torch.arange(T, device=self.len_B.device)
        return self._slots_BT

    def _visible_rows(self, mask: Mask, T: int, start: int, used: int, g: int, window: int) -> Tensor:
        """Mask [B, 1, g*T or 1, used - start] of the positions that each packed row sees; once per step."""
        kept = self._visible.get(window)
        if kept is not None and kept[1:4] == (T, start, used):
            same = kept[0] is mask if isinstance(mask, Tree) else type(kept[0]) is type(mask)
            if same:
                return kept[4]
        slot_C = torch.arange(start, used, device=self.len_B.device)
        if isinstance(mask, Causal):
            visible_BTC = slot_C <= self._slots(T)[:, :, None]  # [C] <= [B, T, 1]
        elif isinstance(mask, PrefixOnly):
            visible_BTC = (slot_C < self.rows_B[:, None])[:, None]
        else:  # a tree: all of the prefix, and among the tail's positions the nodes of the mask
            visible_BTC = (slot_C < self.rows_B[:, None])[:, None].repeat(1, T, 1)
            tail_BTT = (self._slots(T) - start)[:, None].expand(-1, T, -1)
            visible_BTC.scatter_(2, tail_BTT, mask.visible_BNN)
        if window:
            pos_BT, pos_BC = self._positions(mask, T, slot_C)
            visible_BTC = visible_BTC & (pos_BC[:, None] > pos_BT[:, :, None] - window)
        B, rows, _ = visible_BTC.shape
        if rows > 1:  # [B, T, C] -> [B, g * T, C]: repeated for each query head of a group
            visible_BTC = visible_BTC[:, None].expand(-1, g, -1, -1).reshape(B, g * rows, used - start)
        result = visible_BTC[:, None]
        self._visible[window] = (mask, T, start, used, result)
        return result

    def _positions(self, mask: Mask, T: int, slot_C: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the T new tokens and of some slots' entries, counted from the first stored one."""
        slot_BT, first_B1 = self._slots(T), self.rows_B[:, None]
        if not isinstance(mask, Tree):
            return slot_BT, slot_C.expand(len(slot_BT), -1)
        pos_BT = first_B1 + depths(mask.visible_BNN)
        tail_BC = (slot_C - first_B1).clamp(0, T - 1)
        own_BC = (slot_C >= first_B1) & (slot_C < first_B1 + T)
        return pos_BT, torch.where(own_BC, pos_BT.gather(1, tail_BC), slot_C)
