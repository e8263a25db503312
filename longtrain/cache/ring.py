"""A draft's own keys and values: the last W positions in a ring buffer, followed by the nodes of one tree.

Shapes: B batch, F sinks, W window, N tree nodes, P new positions, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.ring_attention import ring_attention


class DraftRing:
    """Constant-size storage: position p is stored at index (p - F) mod W of the ring.

    The buffer has F sinks first, then the ring of W, then the tree's nodes. Positions are stored without
    gaps, so the first one (`since_B`) and the number of tokens of the sequence determine the position at each
    index, and with it the tokens that see it.

    Args:
        batch: number of sequences.
        window: number of previous positions that a token sees.
        like_GD: an empty tensor [G, D] with the device and dtype.
        sinks: number of first positions that every token sees as well.
    """

    def __init__(self, batch: int, window: int, like_GD: Tensor, *, sinks: int = 0) -> None:
        heads, dim = like_GD.shape
        self.window, self.sinks, self.nodes = window, sinks, 0
        # Zeros, not empty: a masked entry has weight 0, and 0 times garbage may be NaN.
        self.k_BGSD = like_GD.new_zeros(batch, heads, sinks + window, dim)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)
        self.since_B = torch.zeros(batch, dtype=torch.int64, device=like_GD.device)
        self._none_B = torch.zeros_like(self.since_B)

    def serves(self, batch: int, like_GD: Tensor) -> bool:
        """True if its batch size, device and dtype fit."""
        k = self.k_BGSD
        return (len(k), k.device, k.dtype) == (batch, like_GD.device, like_GD.dtype)

    def begin(self, since_B: Tensor) -> None:
        """Empty the ring; the next position of each sequence (beside sinks) is `since_B`."""
        self.since_B.copy_(since_B)

    def reserve(self, nodes: int) -> None:
        """Allocate room for trees of this many nodes, if there is less."""
        more = nodes - self.nodes
        if more > 0:
            B, G, _, D = self.k_BGSD.shape
            room = self.k_BGSD.new_zeros(B, G, more, D)
            self.k_BGSD, self.v_BGSD = (torch.cat((x, room), dim=2) for x in (self.k_BGSD, self.v_BGSD))
            self.nodes = nodes

    def positions(self, first_B: Tensor, count_B: Tensor) -> Slots:
        """Buffer positions of `count_B` tokens from position `first_B` on; they overwrite those W earlier.

        Tokens of a step beyond `count_B` are not stored; a step has at most W.
        """
        return Slots(self.k_BGSD, self.v_BGSD, first_B, wrap=self.window, count_B=count_B, fixed=self.sinks)

    def tree(self, first: int, len_B: Tensor) -> Slots:
        """Buffer positions of tree nodes `first, first + 1, ...`; the next tree overwrites them."""
        return Slots(self.k_BGSD, self.v_BGSD, self._none_B, at=self.sinks + self.window + first)

    def attend(self, q_BPHD: Tensor, len_B: Tensor, nodes_BPN: Tensor, *, ahead: int, scale: float) -> Tensor:
        """Attention of tree nodes over the ring (the last W positions before each) and over the tree.

        Args:
            q_BPHD: rotated queries.
            len_B: tokens of each sequence, all of which are stored.
            nodes_BPN: bool mask of the tree's first N nodes that each node sees, itself included.
            ahead: distance of the nodes from those tokens; all are of one level.
            scale: factor on the logits.

        Returns: out_BPHD.
        """
        return ring_attention(
            q_BPHD.transpose(1, 2),
            self.k_BGSD,
            self.v_BGSD,
            (self.since_B, len_B),
            nodes_BPN,
            window=self.window,
            ahead=ahead,
            scale=scale,
            sinks=self.sinks,
        ).transpose(1, 2)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that drafting reads and writes in place."""
        return self.k_BGSD, self.v_BGSD, self.since_B

    def bytes(self) -> int:
        """Bytes of keys, values and positions."""
        return self.k_BGSD.nbytes + self.v_BGSD.nbytes + self.since_B.nbytes + self._none_B.nbytes
