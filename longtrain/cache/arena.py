"""Caches for decoding with CUDA graphs: buffers at fixed addresses, and lengths on the device only.

Shapes: L layers, B batch, T new tokens, S cache positions, N rows of a buffer, P path, H query heads, G KV
heads, D head dim, X = B * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from longtrain.cache.base import KernelMask, KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import EvictedCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.room import check_room
from longtrain.cache.thinning import ThinningCache
from longtrain.cache.window import WindowCache
from longtrain.errors import ConfigError
from longtrain.kernels.fused_layer import Slots, move_entries, write_rows
from longtrain.kernels.tree_attention import MAX_NODES, tree_attention

_LEAST_SLOTS = 256


class ArenaCache(KVCache):
    """Position s of the buffer has the s-th stored entry of a sequence; the tail follows at `rows_B[b]`.

    Every step is a fixed sequence of device operations on the same tensors, updated in place, so one CUDA
    graph serves every length, and later batches of the same size. Prompts are read into `store`, an ordinary
    cache over the same buffers, or into a cache of their own, and `take` moves them in. With windows a
    sequence has fewer entries (`rows_B`) than positions (`len_B`). Over a `WindowCache` entries are dropped
    between two steps, outside of the graph (`foresee`).

    Args:
        store: cache whose buffers become the arena's.
        splits: see `tree_attention`.
    """

    def __init__(self, store: DenseCache, *, splits: int | None = None) -> None:
        self.store, self._splits = store, splits
        self._counts_2B = store.len_B.new_zeros(2, len(store.len_B))
        self.len_B, self.rows_B = self._counts_2B.unbind(0)
        self._dropped_B = store.dropped_B.clone() if isinstance(store, WindowCache) else None
        self._masks = KernelMask()
        self._claimed = self._used = self._high = self._tail = 0

    @property
    def slots(self) -> int:
        """Capacity of a sequence, in positions."""
        return self.store.limit

    @property
    def claimed(self) -> int:
        """Most positions that the present sequences will need."""
        return self._claimed

    def fits(self, cache: KVCache, room: int) -> bool:
        """True if the cache is of the store's kind and sizes, and there is room after its entries."""
        store = self.store
        if not isinstance(cache, type(store)):
            return False
        alike = (cache.sizes, cache.windows) == (store.sizes, store.windows)
        return alike and cache.used + room <= self.slots

    def take(self, cache: KVCache, *, room: int) -> None:
        """Copy the entries of a cache into the arena; only lengths are copied if it is `store`.

        Args:
            cache: committed, a `DenseCache`.
            room: positions needed after its entries; they fit (`fits`).
        """
        assert isinstance(cache, DenseCache)
        # The store counts positions; what comes from elsewhere needs room for its entries only.
        self._used = cache.limit - cache.room_left() if cache is self.store else cache.used
        self._claimed, self._high = self._used + room, cache.used
        if cache is not self.store:
            self.store.k_LBGSD[..., : cache.used, :] = cache.k_LBGSD[..., : cache.used, :]
            self.store.v_LBGSD[..., : cache.used, :] = cache.v_LBGSD[..., : cache.used, :]
        self.rows_B.copy_(cache.rows_B)
        self.len_B.copy_(cache.len_B)
        if self._dropped_B is not None:
            self._dropped_B.copy_(self.len_B - self.rows_B)

    def begin(self, place_N: Tensor, tokens_N: Tensor) -> None:
        """Let some sequences go on from their first entries; the others stay as they are.

        Args:
            place_N: the sequences, int64 on the device.
            tokens_N: number of entries of each, likewise.
        """
        self._counts_2B[:, place_N] = tokens_N

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail entries of a layer at positions `rows_B[b]...`, overwriting any earlier tail."""
        write_rows(k_BGTD, v_BGTD, self.tail_slots(layer, k_BGTD.shape[2]))

    def tail_slots(self, layer: int, rows: int) -> Slots:
        """See `KVCache`."""
        self._make_room(rows)
        self._tail = rows
        return Slots(self.store.k_LBGSD[layer], self.store.v_LBGSD[layer], self.rows_B)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over prefix and tail, with its lse."""
        k_BGSD, v_BGSD = self.store.k_LBGSD[layer], self.store.v_LBGSD[layer]
        bits = self._masks.of(mask)
        return tree_attention(q_BHTD, k_BGSD, v_BGSD, self.rows_B, bits, scale=scale, splits=self._splits)

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`. Stored entries before a token's window are not read."""
        dropped_B = self._dropped_B
        return tree_attention(
            q_BHTD,
            self.store.k_LBGSD[layer],
            self.store.v_LBGSD[layer],
            self.rows_B if dropped_B is None else self.len_B,
            self._masks.of(mask),
            scale=scale,
            window=window,
            depth_BT=self._masks.depths(mask),
            dropped_B=dropped_B,
        )

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`. Entries move only to positions of earlier nodes, so they can move in place."""
        if path_BP is not None:
            move_entries(self.store.k_LBGSD, self.store.v_LBGSD, self.rows_B, path_BP, None)
        self._counts_2B.add_(n_B)
        self._high += self._tail if path_BP is None else path_BP.shape[1]
        self._masks.forget()

    def foresee(self, rows: int) -> None:
        """See `KVCache`: layers with windows drop entries between recorded cycles, not within them."""
        if isinstance(self.store, WindowCache):
            self._make_room(self.store.max_nodes)
        self._high += rows

    def _make_room(self, rows: int) -> None:
        """Drop entries before the windows if a step of so many tokens would not fit."""
        store = self.store
        if not isinstance(store, WindowCache) or not store.overflows(self._high, rows):
            return
        assert self._dropped_B is not None
        first_B = store.first_kept(self.len_B)
        start_B = first_B - self._dropped_B
        # the counts first: a kernel may read them before the last move has ended (`kernels.devices`)
        self._dropped_B.copy_(first_B)
        self.rows_B.copy_(self.len_B - first_B)
        store.to_front(start_B)
        self._high = min(self._high, store.kept)
        if self._high + rows > store.capacity:
            raise ConfigError(f"a step of {rows} tokens for static buffers with room for {store.max_nodes}")

    def tensors(self) -> tuple[Tensor, ...]:
        """See `KVCache`."""
        return self.store.k_LBGSD, self.store.v_LBGSD, self.rows_B, self.len_B

    def room_left(self) -> int:
        """See `KVCache`: the capacity left after the prompts, usually more than was requested."""
        return self.slots - self._used

    def bytes(self) -> int:
        """Bytes of the positions that these sequences need, and of lengths; the arena may be larger."""
        slot = self.store.k_LBGSD[..., 0, :].nbytes + self.store.v_LBGSD[..., 0, :].nbytes
        counts = self._counts_2B.nbytes + (0 if self._dropped_B is None else self._dropped_B.nbytes)
        return min(self._claimed, self.store.capacity) * slot + counts


class RaggedArena(KVCache):
    """One buffer for caches whose layers, sequences and KV heads have different numbers of entries.

    Those of each layer, sequence and head are adjacent, with room for new ones behind them, without padding.
    Where they begin, and their number, is on the device, so that one CUDA graph serves every distribution.

    Args:
        like: a cache of as many layers, with the other sizes.
        rows: capacity: entries of all layers, sequences and heads together.

    Raises:
        NoRoomError: there is too little memory.
    """

    store: None = None
    """No other cache has its entries in this buffer."""

    def __init__(self, like: DenseCache, rows: int) -> None:
        k_LBGSD, device = like.k_LBGSD, like.len_B.device
        L, B, G, _, D = k_LBGSD.shape
        needed, tokens = 2 * rows * D * k_LBGSD.itemsize, rows // (L * B * G)
        check_room(needed, device, what="a KV cache after eviction", batch=B, tokens=tokens)
        # Zeros, not empty: a masked position has weight 0, and 0 times garbage may be NaN.
        self._k_ND, self._v_ND = (k_LBGSD.new_zeros(rows, D) for _ in range(2))
        self._k_LBGND, self._v_LBGND = (x.expand(L, B, G, -1, -1) for x in (self._k_ND, self._v_ND))
        self._places_3LBG = like.len_B.new_zeros(3, L, B, G)
        self._first_LBG, self._next_LBG, self._count_LBG = self._places_3LBG.unbind(0)
        """Row of the first entry, row of the next new one, and number of committed entries."""
        self.len_B = torch.zeros_like(like.len_B)
        self._sizes, self._masks = like.sizes, KernelMask()
        self._claimed = self._room = 0

    def fits(self, cache: KVCache, room: int) -> bool:
        """See `ArenaCache`."""
        tail, _, size_LBG = _parts(cache, room)
        alike = tail.sizes == self._sizes and size_LBG.shape == self._first_LBG.shape
        return alike and int(size_LBG.sum()) <= len(self._k_ND)

    def take(self, cache: KVCache, *, room: int) -> None:
        """Copy the entries of a cache that fits (`fits`), with room for so many new ones of each head."""
        tail, before_LBG, size_LBG = _parts(cache, room)
        self._claimed, self._room = int(size_LBG.sum()), room
        first_LBG = size_LBG.flatten().cumsum(0).view_as(size_LBG) - size_LBG
        device = self.len_B.device
        at_2LBG = torch.stack((first_LBG, before_LBG)).to(device, non_blocking=True)
        for layer, prefix in enumerate(cache.prefixes or () if isinstance(cache, EvictedCache) else ()):
            first_X, count_X = at_2LBG[:, layer].flatten(1)
            N = len(prefix.k_ND)
            shift_X = first_X - (count_X.cumsum(0) - count_X)
            row_N = torch.repeat_interleave(shift_X, count_X, output_size=N) + torch.arange(N, device=device)
            self._k_ND[row_N], self._v_ND[row_N] = prefix.k_ND, prefix.v_ND
        for layer, row_BG in enumerate(at_2LBG.sum(0)):
            row_BGU = row_BG[..., None] + torch.arange(tail.used, device=device)
            self._k_ND[row_BGU] = tail.k_LBGSD[layer, :, :, : tail.used]
            self._v_ND[row_BGU] = tail.v_LBGSD[layer, :, :, : tail.used]
        self._first_LBG.copy_(at_2LBG[0])
        self._count_LBG.copy_(at_2LBG[1] + tail.rows_B[:, None])
        self._next_LBG.copy_(self._first_LBG + self._count_LBG)
        self.len_B.copy_(cache.len_B)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail entries of a layer behind those of each head, overwriting any earlier tail."""
        write_rows(k_BGTD, v_BGTD, self.tail_slots(layer, k_BGTD.shape[2]))

    def tail_slots(self, layer: int, rows: int) -> Slots:
        """See `KVCache`."""
        return Slots(self._k_LBGND[layer], self._v_LBGND[layer], self._next_LBG[layer])

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over prefix and tail, with its lse."""
        k_BGND, v_BGND, count_BG = self._k_LBGND[layer], self._v_LBGND[layer], self._count_LBG[layer]
        bits, first_BG = self._masks.of(mask), self._first_LBG[layer]
        return tree_attention(q_BHTD, k_BGND, v_BGND, count_BG, bits, scale=scale, first_BG=first_BG)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`. Entries move only to positions of earlier nodes, so they can move in place."""
        if path_BP is not None:
            move_entries(self._k_LBGND, self._v_LBGND, self._next_LBG, path_BP, None)
        self._places_3LBG[1:].add_(n_B[:, None])
        self.len_B.add_(n_B)
        self._masks.forget()

    def tensors(self) -> tuple[Tensor, ...]:
        """See `KVCache`."""
        return self._k_ND, self._v_ND, self._places_3LBG, self.len_B

    def room_left(self) -> int:
        """See `KVCache`."""
        return self._room

    def bytes(self) -> int:
        """Bytes of the entries, of the room behind them, and of their places; the arena may be larger."""
        entry = self._k_ND[0].nbytes + self._v_ND[0].nbytes
        return self._claimed * entry + self._places_3LBG.nbytes + self.len_B.nbytes


class LayeredArena(LayeredCache):
    """Arenas of the layers that see the whole text, and of those with a window.

    Args:
        full: arena of the former.
        near: arena of the latter.
        windows: see `LayeredCache`.
        store: the cache whose buffers are the arenas'; None: they have their own.
    """

    def __init__(
        self,
        full: ArenaCache | RaggedArena,
        near: ArenaCache,
        windows: Sequence[int],
        store: LayeredCache | None = None,
    ) -> None:
        self.store, self._arenas = store, (full, near)
        super().__init__(full, near, windows)

    @property
    def slots(self) -> int:
        """Capacity of a sequence, in positions."""
        return self._arenas[1].slots

    def fits(self, cache: KVCache, room: int) -> bool:
        """See `ArenaCache`."""
        if not isinstance(cache, LayeredCache):
            return False
        full, near = self._arenas
        return full.fits(cache.full, room) and near.fits(cache.near, room)

    def take(self, cache: KVCache, *, room: int) -> None:
        """See `ArenaCache`."""
        assert isinstance(cache, LayeredCache)
        for arena, part in zip(self._arenas, (cache.full, cache.near), strict=True):
            arena.take(part, room=room)


Arena: TypeAlias = ArenaCache | RaggedArena | LayeredArena


def rounded_slots(slots: int) -> int:
    """Round a capacity up by at most an eighth, so that prompts of similar length share buffers."""
    step = max(_LEAST_SLOTS, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step


def arena_over(store: KVCache) -> ArenaCache | LayeredArena:
    """An arena whose buffers are those of a cache, into which prompts are read."""
    if isinstance(store, LayeredCache):
        full, near = arena_over(store.full), arena_over(store.near)
        assert isinstance(full, ArenaCache) and isinstance(near, ArenaCache)
        return LayeredArena(full, near, store.windows, store)
    assert isinstance(store, DenseCache)
    return ArenaCache(store)


def arena_for(cache: KVCache, room: int) -> Arena:
    """An arena that a cache which is `movable` fits, and somewhat longer ones."""
    if isinstance(cache, LayeredCache):
        full, near = arena_for(cache.full, room), arena_for(cache.near, room)
        assert isinstance(full, RaggedArena) and isinstance(near, ArenaCache)
        return LayeredArena(full, near, cache.windows)
    tail, _, size_LBG = _parts(cache, room)
    if not any(tail.windows):
        return RaggedArena(tail, rounded_slots(int(size_LBG.sum())))
    sizes = {"n_layers": len(size_LBG), "windows": tail.windows, "max_nodes": MAX_NODES, **tail.sizes}
    return ArenaCache(type(tail)(max_tokens=rounded_slots(tail.used + room) - MAX_NODES, **sizes))


def movable(cache: KVCache) -> bool:
    """True if an arena can copy the entries, and decoding only adds to them."""
    if isinstance(cache, LayeredCache):
        return movable(cache.full) and movable(cache.near)
    return isinstance(cache, DenseCache | EvictedCache) and not isinstance(cache, ThinningCache)


def _parts(cache: KVCache, room: int) -> tuple[DenseCache, Tensor, Tensor]:
    """The dense part of a cache; of each layer, sequence and head the number of entries before it, and of all
    with so much room behind them.
    """
    tail = cache.tail if isinstance(cache, EvictedCache) else cache
    assert isinstance(tail, DenseCache)
    before_LBG = torch.zeros(tail.k_LBGSD.shape[:3], dtype=torch.int64)
    if isinstance(cache, EvictedCache) and cache.prefixes:
        before_LBG = cache.n_LBG
    return tail, before_LBG, before_LBG + tail.used + room
