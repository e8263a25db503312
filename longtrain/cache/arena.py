"""A cache for decoding with CUDA graphs: buffers at fixed addresses, and lengths on the device only.

Shapes: L layers, B batch, T new tokens, S cache positions, N tree nodes, P path, H query heads, G KV heads, D
head dim.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.cache.base import KernelMask, KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import EvictedCache
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.fused_layer import Slots, move_entries, write_rows
from longtrain.kernels.tree_attention import tree_attention

_LEAST_SLOTS = 256


class ArenaCache(KVCache):
    """Position s of the buffer has the s-th stored entry of a sequence; the tail follows at `rows_B[b]`.

    Every step is a fixed sequence of device operations on the same tensors, updated in place, so one CUDA
    graph serves every length, and later batches of the same size. Prompts are read into `store`, an ordinary
    cache over the same buffers, or, for eviction, into a cache of their own; `take` moves them in. After
    eviction a sequence has fewer entries (`rows_B`) than positions (`len_B`).

    Args:
        store: cache whose buffers become the arena's; its `base` is 0.
    """

    def __init__(self, store: DenseCache) -> None:
        self.store = store
        self._counts_2B = store.len_B.new_zeros(2, len(store.len_B))
        self.len_B, self.rows_B = self._counts_2B.unbind(0)
        self._masks = KernelMask()
        self._claimed = self._used = 0

    @property
    def slots(self) -> int:
        """Capacity of a sequence, in positions."""
        return self.store.capacity

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
        self._claimed, self._used = dense.used + room, dense.used
        if self._claimed > self.slots:
            raise ConfigError(f"{self._claimed} positions for an arena of {self.slots}; make a larger one")
        if dense is not self.store:
            for own, other in (
                (self.store.k_LBGSD, dense.k_LBGSD),
                (self.store.v_LBGSD, dense.v_LBGSD),
            ):
                own[..., : dense.used, :].copy_(other[..., : dense.used, :])
        self.rows_B.copy_(dense.base + dense.len_B)
        self.len_B.copy_(cache.len_B)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail entries of a layer at positions `rows_B[b]...`, overwriting any earlier tail."""
        write_rows(k_BGTD, v_BGTD, self.tail_slots(layer, k_BGTD.shape[2]))

    def tail_slots(self, layer: int, rows: int) -> Slots:
        """See `KVCache`."""
        return Slots(self.store.k_LBGSD[layer], self.store.v_LBGSD[layer], self.rows_B)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over prefix and tail, with its lse."""
        k_BGSD, v_BGSD = self.store.k_LBGSD[layer], self.store.v_LBGSD[layer]
        return tree_attention(q_BHTD, k_BGSD, v_BGSD, self.rows_B, self._masks.of(mask), scale=scale)

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`. All entries are stored, and those before a token's window are not read."""
        return tree_attention(
            q_BHTD,
            self.store.k_LBGSD[layer],
            self.store.v_LBGSD[layer],
            self.rows_B,
            self._masks.of(mask),
            scale=scale,
            window=window,
            depth_BT=self._masks.depths(mask),
        )

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`. Entries move only to positions of earlier nodes, so they can move in place."""
        if path_BP is not None:
            move_entries(self.store.k_LBGSD, self.store.v_LBGSD, self.rows_B, path_BP, None)
        self._counts_2B.add_(n_B)
        self._masks.forget()

    def tensors(self) -> tuple[Tensor, ...]:
        """See `KVCache`."""
        return self.store.k_LBGSD, self.store.v_LBGSD, self.rows_B, self.len_B

    def room_left(self) -> int:
        """See `KVCache`: the capacity left after the prompts, usually more than was requested."""
        return self.slots - self._used

    def bytes(self) -> int:
        """Bytes of the positions that these sequences need, and of lengths; the arena may be larger."""
        slot = self.store.k_LBGSD[..., 0, :].nbytes + self.store.v_LBGSD[..., 0, :].nbytes
        return self._claimed * slot + self.len_B.nbytes + self.rows_B.nbytes


def rounded_slots(slots: int) -> int:
    """Round a capacity up by at most an eighth, so that prompts of similar length share buffers."""
    step = max(_LEAST_SLOTS, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step


def movable(cache: KVCache) -> DenseCache | None:
    """Return the entries as one dense cache that an arena can copy; None if heads or layers differ."""
    if isinstance(cache, EvictedCache):
        return cache.tail if cache.prefixes is None else None
    return cache if isinstance(cache, DenseCache) else None
