"""A cache for captured decoding: buffers that stay where they are, lengths that only the device knows.

Shapes: L layers, B batch, T new rows, S slots, N tree nodes, P path, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.cache.base import KernelMask, KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import EvictedCache
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.fused_layer import Slots, move_rows, write_rows
from longtrain.kernels.tree_attention import tree_attention

_LEAST_SLOTS = 256


class ArenaCache(KVCache):
    """Slot s of a sequence holds the s-th row that it kept; the tail follows at slot `rows_B[b]`.

    Every step is a fixed sequence of device operations on the same tensors, updated in place, so a CUDA
    graph of it serves every length, and later batches of the same size. Prompts are read elsewhere: into
    `store`, an ordinary cache over the same buffers, or, to be evicted, into a cache of their own; `take`
    moves them in. After eviction a sequence has fewer rows than positions: `rows_B` counts rows, `len_B`
    positions.

    Args:
        store: cache whose buffers become the arena's; with no slots before position 0.
    """

    def __init__(self, store: DenseCache) -> None:
        self.store = store
        self._counts_2B = store.len_B.new_zeros(2, len(store.len_B))
        self.len_B, self.rows_B = self._counts_2B.unbind(0)
        self._masks = KernelMask()
        self._claimed = self._used = 0

    @property
    def slots(self) -> int:
        """Slots of a sequence."""
        return self.store.capacity

    @property
    def claimed(self) -> int:
        """Slots that the present texts will need at most."""
        return self._claimed

    def take(self, cache: KVCache, *, room: int) -> None:
        """Move in what a cache holds: nothing but lengths if that is `store`, else its rows too.

        Args:
            cache: committed, see `movable`.
            room: slots that will be needed after its rows.

        Raises:
            ConflictError: heads or layers of the cache hold different numbers of rows.
            ConfigError: there are not enough slots.
        """
        dense = movable(cache)
        if dense is None:
            raise ConflictError(
                f"a {type(cache).__name__} whose heads keep different numbers of rows cannot be decoded from "
                "static buffers; pass capture=False, or evict evenly"
            )
        self._claimed, self._used = dense.used + room, dense.used
        if self._claimed > self.slots:
            raise ConfigError(f"{self._claimed} slots wanted of an arena of {self.slots}; make a larger one")
        if dense is not self.store:
            for own, other in (
                (self.store.k_LBGSD, dense.k_LBGSD),
                (self.store.v_LBGSD, dense.v_LBGSD),
            ):
                own[..., : dense.used, :].copy_(other[..., : dense.used, :])
        self.rows_B.copy_(dense.base + dense.len_B)
        self.len_B.copy_(cache.len_B)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail rows of a layer at slots `rows_B[b]...`, over whatever tail was there."""
        write_rows(k_BGTD, v_BGTD, self.tail_slots(layer, k_BGTD.shape[2]))

    def tail_slots(self, layer: int, rows: int) -> Slots:
        """See `KVCache`."""
        return Slots(self.store.k_LBGSD[layer], self.store.v_LBGSD[layer], self.rows_B)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over prefix and tail, with its lse."""
        k_BGSD, v_BGSD = self.store.k_LBGSD[layer], self.store.v_LBGSD[layer]
        return tree_attention(q_BHTD, k_BGSD, v_BGSD, self.rows_B, self._masks.of(mask), scale=scale)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`. Rows move at most to where earlier ones of the path lay, so in place."""
        if path_BP is not None:
            move_rows(self.store.k_LBGSD, self.store.v_LBGSD, self.rows_B, path_BP, None)
        self._counts_2B.add_(n_B)
        self._masks.forget()

    def tensors(self) -> tuple[Tensor, ...]:
        """See `KVCache`."""
        return self.store.k_LBGSD, self.store.v_LBGSD, self.rows_B, self.len_B

    def rows_left(self) -> int:
        """See `KVCache`: what was there when prompts were taken in, more than was asked for as a rule."""
        return self.slots - self._used

    def bytes(self) -> int:
        """Bytes of the slots that these sequences were given, and of lengths; the arena may be larger."""
        slot = self.store.k_LBGSD[..., 0, :].nbytes + self.store.v_LBGSD[..., 0, :].nbytes
        return self._claimed * slot + self.len_B.nbytes + self.rows_B.nbytes


def rounded_slots(slots: int) -> int:
    """At most an eighth more, so that prompts of about one length share buffers."""
    step = max(_LEAST_SLOTS, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step


def movable(cache: KVCache) -> DenseCache | None:
    """The rows of a cache as one dense block, or None if it is none: an arena takes that alone."""
    if isinstance(cache, EvictedCache):
        return cache.tail if cache.prefixes is None else None
    return cache if isinstance(cache, DenseCache) else None
