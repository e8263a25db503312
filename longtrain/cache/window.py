"""A KV cache of layers with a sliding window: entries that no later token sees make room for new ones.

Shapes: L layers, B batch, T new tokens, S stored entries, K entries that stay, P path, H query heads, G KV
heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longtrain.cache.base import Mask
from longtrain.cache.dense import DenseCache
from longtrain.costs import model
from longtrain.costs.model import window_slots
from longtrain.errors import ConflictError, refusal


class WindowCache(DenseCache):
    """The last entries of each sequence, in order; those that left every window are dropped now and then.

    A new token sees the last `near` entries at most (the largest window less 1). The buffer has room for
    those, for a quarter of a window or two tiles, and for `max_nodes` new tokens. These follow the stored
    entries as in any dense cache, so rejected ones never overwrite what is still seen. Before a step that
    would not fit, the last entries of each sequence move to the front, in all layers. The host knows when by
    its bound on the lengths, so that it never waits for the device, and a CUDA graph contains no such move.

    Entries are thus contiguous and in the order of their positions, and attention is that over a cache of all
    entries. Only whole tiles of positions are dropped, so that up to `kept` entries stay: a kernel that is
    told how many were dropped has each key in the tile where it would be among all entries, and gives the
    same bits. The price is a copy of `kept` entries for each quarter of a window that the host counts.

    A step of more tokens than there is room for (a prompt, or a chunk of one) attends in a buffer that one
    layer needs at a time, and leaves the entries that later tokens see. It must be committed as `expect` was
    told, or in whole, since what it drops is gone.

    Args:
        max_tokens: most committed positions of a sequence.
        max_nodes: most tokens of a step that may be rejected.
        windows: window of each layer, 1 or more.
        sizes: as for `DenseCache`.
    """

    def __init__(self, *, max_tokens: int, max_nodes: int, windows: Sequence[int], **sizes: Any) -> None:
        slots = min(max_tokens, window_slots(max(windows)))
        super().__init__(max_tokens=slots, max_nodes=max_nodes, windows=windows, **sizes)
        self.near, self.max_nodes = max(windows) - 1, max_nodes
        self.kept = self.near + model.TILE - 1
        """Most entries from `first_kept` on."""
        self.limit = max_tokens + max_nodes
        self.dropped_B = torch.zeros_like(self.len_B)
        """Positions of each sequence that are not stored any more, in whole tiles."""
        self._end = 0
        """Upper bound of the committed positions, known on the host."""
        self._expected_B: Tensor | None = None
        self._large: tuple[Tensor, Tensor] | None = None
        """Keys and values of the present layer in a step that does not fit: those stored, then the new."""

    @property
    def rows_B(self) -> Tensor:  # noqa: N802
        """Stored committed entries of each sequence."""
        return self.len_B - self.dropped_B

    def expect(self, n_B: Tensor | None) -> None:
        """See `KVCache`.

        Raises:
            ConflictError: the step before was too large to be taken back, and was not committed.
        """
        if self._large is not None:
            raise ConflictError(
                f"a step of {self._tail} tokens was not committed, and layers with a window store the last "
                f"{self.capacity} entries; commit it, or use a plain cache (Target.plain_cache)"
            )
        self._expected_B = n_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail entries of a layer; before the first layer's, entries are dropped if need be."""
        T = k_BGTD.shape[2]
        if self._large is None and self._high > self.kept and self.overflows(self._high, T):
            self.to_front(self.first_kept(self.len_B) - self.dropped_B)
            self._drop()
        if not self.overflows(self._high, T):
            super().write(layer, k_BGTD, v_BGTD)
            return
        self._tail, size = T, self._high + T
        after_B = self.len_B + (T if self._expected_B is None else self._expected_B)
        index = self._from(self.first_kept(after_B) - self.dropped_B, size)
        index = index.expand(-1, k_BGTD.shape[1], -1, k_BGTD.shape[3])
        both = []
        for buffer_BGSD, new_BGTD in ((self.k_LBGSD[layer], k_BGTD), (self.v_LBGSD[layer], v_BGTD)):
            whole_BGSD = new_BGTD
            if self._high:
                whole_BGSD = torch.cat((buffer_BGSD[:, :, : self._high], new_BGTD), 2)
                whole_BGSD[self._row_B[:, None], :, self._slots(T)] = new_BGTD.transpose(1, 2)
            buffer_BGSD[:, :, : self.kept] = whole_BGSD.gather(2, index)
            both.append(whole_BGSD)
        self._large = both[0], both[1]

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Refused: entries before the window are not stored (ConflictError)."""
        raise ConflictError(
            f"layer {layer} of this cache has a sliding window, and entries before it are not stored; read a "
            "layer that sees the whole text"
        )

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `DenseCache`.

        Raises:
            ConflictError: a step that did not fit is committed otherwise than `expect` was told.
        """
        large, expected_B, self._expected_B = self._large is not None, self._expected_B, None
        if large:
            expected_B = torch.full_like(n_B, self._tail) if expected_B is None else expected_B
            if path_BP is not None or not torch.equal(n_B, expected_B):
                raise refusal(
                    ConflictError,
                    f"a step of {self._tail} tokens of which {n_B.tolist()} are committed, over layers that "
                    f"store the last {self.capacity} entries",
                    "all tokens of such a step (pass the lengths of right-padded ones to `expect`)",
                )
        self._large = None
        self._end += self._tail if path_BP is None else path_BP.shape[1]
        super().commit(path_BP, n_B)
        if large:
            self._drop()

    def overflows(self, rows: int, new: int) -> bool:
        """True if `new` tokens do not fit behind `rows` entries, and entries can be dropped."""
        return rows + new > self.capacity < self.limit

    def first_kept(self, len_B: Tensor) -> Tensor:
        """First position that stays of so many where others are dropped: the last `near`, and their tile."""
        return (len_B - self.near).clamp(min=0) // model.TILE * model.TILE

    def to_front(self, start_B: Tensor) -> None:
        """Move `kept` entries from these on to the front, in all layers, without a host sync."""
        L, _, G, _, D = self.k_LBGSD.shape
        index = self._from(start_B, self.capacity)[None].expand(L, -1, G, -1, D)
        for buffer in (self.k_LBGSD, self.v_LBGSD):
            buffer[:, :, :, : self.kept] = buffer.gather(3, index)

    def resume(self, lengths: Sequence[int]) -> None:
        """Begin with texts of these lengths, whose entries from `first_kept` on were put to the front."""
        whole_B = torch.tensor(lengths, dtype=torch.int64)
        dropped_B = self.first_kept(whole_B)
        super().rewind((whole_B - dropped_B).tolist())
        device = self.len_B.device
        self.dropped_B, self.len_B = (x.to(device, non_blocking=True) for x in (dropped_B, whole_B))
        self._end, self._large = max(lengths), None

    def rewind(self, lengths: Sequence[int]) -> None:
        """Empty the cache.

        Raises:
            ConflictError: some of `lengths` is not 0.
        """
        if max(lengths):
            raise ConflictError(
                f"layers with a window cannot go back to {list(lengths)} tokens, as earlier entries may be "
                "gone; use a plain cache (Target.plain_cache)"
            )
        self.resume(lengths)

    def room_left(self) -> int:
        """See `KVCache`: positions, which need no storage of their own."""
        return max(0, self.limit - self._end)

    def bytes(self) -> int:
        """Bytes of K, V, lengths and numbers of dropped positions."""
        return super().bytes() + self.dropped_B.nbytes

    def _from(self, start_B: Tensor, size: int) -> Tensor:
        """Indices [B, 1, K, 1] of `kept` entries from `start_B` on, below `size`."""
        at_BK = start_B[:, None] + torch.arange(self.kept, device=start_B.device)
        return at_BK.clamp(max=size - 1)[:, None, :, None]

    def _drop(self) -> None:
        """Count all entries before `first_kept`, which is at the front, as dropped."""
        self.dropped_B = self.first_kept(self.len_B)
        self._low, self._high = min(self._low, self.near), min(self._high, self.kept)
        self._slots_BT = None
        self._visible.clear()

    def _stored(self, layer: int, used: int) -> tuple[Tensor, Tensor]:
        """See `DenseCache`; attention comes right after the layer's entries were written."""
        return self._large or super()._stored(layer, used)

    def _tighten(self, T: int) -> None:
        """See `DenseCache`: where entries are dropped, there is room, and exact lengths are not needed."""
        if self.capacity == self.limit:
            super()._tighten(T)
