"""A draft's own KV cache: some entries that stay, the newest ones in a ring buffer, and drafted ones behind.

Shapes: L layers, B batch, S prompt tokens, T new tokens, F entries that stay, X entries picked of a prompt, G
KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.arena import ArenaCache
from longtrain.decoding.evict import Budget

if TYPE_CHECKING:
    from longtrain.methods.magicdec.config import Config
    from longtrain.targets.model import Target

ROOM = 32
"""Most drafted tokens that can follow the committed ones."""
_STEP = 64
"""Buffer sizes are a multiple of this, so that prompts of similar length share them."""


@dataclass(frozen=True)
class Layout:
    """Number of cache entries of each sequence, on the host.

    Args:
        lengths: tokens of the prompts.
        fixed: entries that stay.
        newest: size of the ring buffer of the newest tokens.
    """

    lengths: tuple[int, ...]
    fixed: tuple[int, ...]
    newest: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], config: Config) -> Layout:
        """Compute the layout from the budget; no sequence gets fewer entries than `config.least_tokens`."""
        budget = Budget(ratio=config.budget)
        rows = [max(config.least_tokens, budget.of(length)) for length in lengths]
        newest = tuple(map(config.newest, rows))
        fixed = tuple(n - m for n, m in zip(rows, newest, strict=True))
        return cls(tuple(lengths), fixed, newest)

    @property
    def rows(self) -> tuple[int, ...]:
        """Most entries of each sequence."""
        return tuple(n + m for n, m in zip(self.fixed, self.newest, strict=True))

    @property
    def choices(self) -> tuple[int, ...]:
        """Leading tokens of each prompt that its fixed entries are chosen among: all before the newest."""
        return tuple(
            length - newest if length > fixed + newest else min(fixed, length)
            for length, fixed, newest in zip(self.lengths, self.fixed, self.newest, strict=True)
        )


class SparseBuffers:
    """KV buffers for a batch; an entry's place follows from its position, so nothing is ever moved.

    Position p below `fixed` has place p, unless other entries were chosen to stay there; any other has place
    `fixed + (p - fixed) mod newest`. Keys carry the rotary angles of their own positions, so attention needs
    no order. Drafted entries follow the last place in use; the very last place is written by padding and
    never read.

    Args:
        target: the target whose entries they are.
        batch: number of sequences.
        rows: most entries of a sequence.
    """

    def __init__(self, target: Target, batch: int, rows: int) -> None:
        slots = -(-rows // _STEP) * _STEP + ROOM + 1
        self.arena = ArenaCache(target.plain_cache(batch, slots, 0))
        self.fixed_B = torch.zeros_like(self.arena.len_B)
        self.newest_B = torch.ones_like(self.arena.len_B)
        self.one_B = torch.ones_like(self.arena.len_B)
        self._row_B1 = torch.arange(batch, device=self.one_B.device)[:, None]
        self._trash = slots - 1
        self._near: tuple[Tensor, Tensor] | None = None
        self._claimed = slots

    def serves(self, target: Target, batch: int, rows: int) -> bool:
        """Return True if the buffers are large enough, and of the target's dtype and device."""
        k = self.arena.store.k_LBGSD
        like = (k.shape[1], k.device, k.dtype) == (batch, target.device, target.dtype)
        return like and rows <= self._trash - ROOM

    def lay_out(self, layout: Layout) -> None:
        """Discard all content and set the layout of the next prompts."""
        device = self.one_B.device
        n_B, fixed_B, newest_B = (
            torch.tensor(x, device=device) for x in (layout.lengths, layout.fixed, layout.newest)
        )
        self._claimed = max(layout.rows) + ROOM + 1
        self.fixed_B.copy_(fixed_B)
        self.newest_B.copy_(newest_B)
        first_B1 = torch.maximum(n_B - newest_B, torch.minimum(fixed_B, n_B))[:, None]
        pos_BT = first_B1 + torch.arange(max(layout.newest), device=device)
        inside_BT = pos_BT < n_B[:, None]
        self._near = pos_BT.where(inside_BT, 0), self._slot(pos_BT, inside_BT)

    def read(self, layer: int, k_BGSD: Tensor, v_BGSD: Tensor, fixed_BGF: Tensor, n_B: Tensor) -> None:
        """Store a layer's entries of the prompts: those that stay, and the newest.

        Args:
            layer: number of the layer.
            k_BGSD: keys of the prompts, after RoPE, right-padded.
            v_BGSD: values.
            fixed_BGF: positions of the entries that stay.
            n_B: number of those in each sequence.
        """
        assert self._near is not None
        near_BT, slot_BT = self._near
        B, G, F = fixed_BGF.shape
        at_F = torch.arange(F, device=near_BT.device)
        slot_BX = torch.cat((at_F.where(at_F < n_B[:, None], self._trash), slot_BT), 1)
        pos_BGX = torch.cat((fixed_BGF, near_BT[:, None].expand(B, G, -1)), 2)
        index = pos_BGX[..., None].expand(-1, -1, -1, k_BGSD.shape[-1])
        goal = slot_BX[:, None, :, None].expand_as(index)
        store = self.arena.store
        for buffer, rows in ((store.k_LBGSD, k_BGSD), (store.v_LBGSD, v_BGSD)):
            buffer[layer].scatter_(2, goal, rows.gather(2, index))

    def take(self, k_LBGTD: Tensor, v_LBGTD: Tensor, pos_BT: Tensor, valid_BT: Tensor) -> None:
        """Store the entries of new tokens, overwriting the oldest in the ring buffer.

        Args:
            k_LBGTD: keys, after RoPE.
            v_LBGTD: values.
            pos_BT: positions, increasing.
            valid_BT: True for tokens to store; at most `newest` in a sequence.
        """
        slot_BT = self._slot(pos_BT, valid_BT)
        store = self.arena.store
        for buffer, rows in ((store.k_LBGSD, k_LBGTD), (store.v_LBGSD, v_LBGTD)):
            buffer[:, self._row_B1, :, slot_BT] = rows.permute(1, 3, 0, 2, 4)

    def restart(self, len_B: Tensor) -> ArenaCache:
        """Return the entries of sequences of `len_B` tokens as a cache for drafting."""
        self.arena.rows_B.copy_(torch.minimum(len_B, self.fixed_B + self.newest_B))
        self.arena.len_B.copy_(len_B)
        return self.arena

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that drafting reads and writes, all in place."""
        return *self.arena.tensors(), self.fixed_B, self.newest_B

    def bytes(self) -> int:
        """Return the bytes of the places these sequences use, and of counts; the buffers may be larger."""
        k_LBGSD, v_LBGSD, *small = self.tensors()
        slot = k_LBGSD[..., 0, :].nbytes + v_LBGSD[..., 0, :].nbytes
        return self._claimed * slot + sum(x.nbytes for x in small)

    def _slot(self, pos_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """Return the places of positions; the last place for those that are not valid."""
        fixed_B1 = self.fixed_B[:, None]
        # ring buffer behind the fixed entries
        later_BT = fixed_B1 + (pos_BT - fixed_B1) % self.newest_B[:, None]
        return pos_BT.where(pos_BT < fixed_B1, later_BT).where(valid_BT, self._trash)
