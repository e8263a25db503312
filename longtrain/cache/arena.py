"""A cache for decoding with CUDA graphs: buffers at fixed addresses, and lengths on the device only.

Shapes: L layers, B batch, T new tokens, S cache positions, N tree nodes, P path, H query heads, G KV heads, D
head dim.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.cache.base import KernelMask, KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import EvictedCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.window import WindowCache
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.fused_layer import Slots, move_entries, write_rows
from longtrain.kernels.tree_attention import tree_attention

_LEAST_SLOTS = 256


class ArenaCache(KVCache):
    """Position s of the buffer has the s-th stored entry of a sequence; the tail follows at `rows_B[b]`.

    Every step is a fixed sequence of device operations on the same tensors, updated in place, so one CUDA
    graph serves every length, and later batches of the same size. Prompts are read into `store`, an ordinary
    cache over the same buffers, or, for eviction, into a cache of their own; `take` moves them in. After
    eviction, or with windows, a sequence has fewer entries (`rows_B`) than positions (`len_B`). Over a
    `WindowCache` entries are dropped between two steps, outside of the graph (`foresee`).

    Args:
        store: cache whose buffers become the arena's; its `base` is 0.
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

    def take(self, cache: KVCache, *, room: int) -> None:
        """Copy the entries of a cache into the arena; only lengths are copied if it is `store`.

        Args:
            cache: committed, see `movable`.
            room: positions needed after its entries.

        Raises:
            ConflictError: heads or layers of the cache have different numbers of entries.
            ConfigError: the capacity is too small.
        """
        dense = movable(cache)
        if dense is None:
            raise ConflictError(
                f"a {type(cache).__name__} whose heads have different numbers of entries cannot be decoded "
                "from static buffers; pass capture=False, or evict evenly"
            )
        # The store counts positions; what comes from elsewhere needs room for its entries only.
        self._used = dense.limit - dense.room_left() if dense is self.store else dense.used
        self._claimed, self._high = self._used + room, dense.used
        if self._claimed > self.slots:
            raise ConfigError(f"{self._claimed} positions for an arena of {self.slots}; make a larger one")
        if dense is not self.store:
            for own, other in (
                (self.store.k_LBGSD, dense.k_LBGSD),
                (self.store.v_LBGSD, dense.v_LBGSD),
            ):
                own[..., : dense.used, :].copy_(other[..., : dense.used, :])
        self.rows_B.copy_(dense.base + dense.rows_B)
        self.len_B.copy_(cache.len_B)
        if self._dropped_B is not None:
            self._dropped_B.copy_(self.len_B - self.rows_B)

    def put(self, place: int, cache: DenseCache, row: int, tokens: int) -> None:
        """Copy the first entries of a sequence of a cache to one of this arena, whose length stays (`begin`).

        Args:
            place: sequence of this arena.
            cache: its `base` is 0.
            row: sequence of that cache.
            tokens: number of entries.
        """
        for own, other in (
            (self.store.k_LBGSD, cache.k_LBGSD),
            (self.store.v_LBGSD, cache.v_LBGSD),
        ):
            own[:, place, :, :tokens].copy_(other[:, row, :, :tokens])

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
        """Drop entries before the windows if a step of so many tokens would not fit.

        Raises:
            ConfigError: they do not fit then either.
        """
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


class LayeredArena(LayeredCache):
    """Arenas of the layers that see the whole text, and of those with a window.

    Args:
        store: a cache whose buffers become the arenas'.
    """

    def __init__(self, store: LayeredCache) -> None:
        assert isinstance(store.full, DenseCache) and isinstance(store.near, DenseCache)
        self.store, self._arenas = store, (ArenaCache(store.full), ArenaCache(store.near))
        super().__init__(*self._arenas, store.windows)

    @property
    def slots(self) -> int:
        """Capacity of a sequence, in positions."""
        return self._arenas[0].slots

    def take(self, cache: KVCache, *, room: int) -> None:
        """See `ArenaCache`."""
        assert isinstance(cache, LayeredCache)
        for arena, part in zip(self._arenas, (cache.full, cache.near), strict=True):
            arena.take(part, room=room)


def rounded_slots(slots: int) -> int:
    """Round a capacity up by at most an eighth, so that prompts of similar length share buffers."""
    step = max(_LEAST_SLOTS, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step


def movable(cache: KVCache) -> DenseCache | None:
    """Return the entries as one dense cache that an arena can copy; None if heads or layers differ.

    With windows: those of the layers that see the whole text, see `LayeredArena`.
    """
    if isinstance(cache, LayeredCache):
        return movable(cache.full) if isinstance(cache.near, DenseCache) else None
    if isinstance(cache, EvictedCache):
        return cache.tail if cache.prefixes is None else None
    return cache if isinstance(cache, DenseCache) else None
