"""The state of a layer that reads the target's own keys and values in place of its own for the text.

Shapes: B batch, R rows of a block, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import PrefixOnly
from longtrain.cache.history import DraftHistory
from longtrain.kernels.attention.split import lse_merge

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.kernels.fused_layer import Slots


class TargetKeys:
    """Room for the keys and values of one block, with the part of `DraftRing` that drafting uses.

    One softmax covers the target's entries of the tokens before the block and the block's own.

    Args:
        batch: number of sequences.
        layer: the target's layer whose entries are read.
        like_GD: an empty tensor [G, D] with the device and dtype.
    """

    def __init__(self, batch: int, layer: int, like_GD: Tensor) -> None:
        self.layer = layer
        self.cache: KVCache | None = None
        """The target's cache; set when sequences are started."""
        self.block = DraftHistory(batch, 0, like_GD)
        self._none_B = torch.zeros(batch, dtype=torch.int64, device=like_GD.device)

    def serves(self, batch: int, like_GD: Tensor) -> bool:
        """Return True if its batch size, device and dtype fit."""
        return self.block.serves(batch, 0, like_GD)

    def tree(self, first: int, len_B: Tensor) -> Slots:
        """Return the buffer positions of rows `first, first + 1, ...`; the next block overwrites them."""
        return self.block.tree(first, self._none_B)

    def attend(self, q_BRHD: Tensor, len_B: Tensor, nodes_BRR: Tensor, *, ahead: int, scale: float) -> Tensor:
        """Attention of rows over the target's entries and the block; see `DraftRing.attend`."""
        assert self.cache is not None
        q_BHRD = q_BRHD.transpose(1, 2)
        far, far_lse = self.cache.attend(self.layer, q_BHRD, mask=PrefixOnly(lse=True), scale=scale)
        assert far_lse is not None
        near, near_lse = self.block.attend_lse(q_BHRD, self._none_B, nodes_BRR, scale=scale)
        out, _ = lse_merge(far, far_lse, near, near_lse)
        return out.to(q_BRHD.dtype).transpose(1, 2)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that drafting reads and writes in place."""
        return self.block.tensors()

    def bytes(self) -> int:
        """Return the bytes of the block's keys and values; those of the text are the target's."""
        return self.block.bytes() + self._none_B.nbytes
