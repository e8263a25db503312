"""A draft's own keys and values: the last W positions in a ring, and the nodes of one tree behind it.

Shapes: B batch, F sinks, W window, N tree nodes, P new positions, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.ring_attention import ring_attention


class DraftRing:
    """Constant-size storage; a position lives in slot `position mod W`, visibility goes by position.

    Buffer rows 0..F-1 are the sinks, then comes the ring, and the tree's nodes follow. Positions are taken
    in without gaps, so where they begin (`since_B`) and how many tokens the sequence has tell which position
    a slot holds.

    Args:
        batch: sequences.
        window: previous positions a row sees.
        like_GD: an empty tensor [G, D] whose device and dtype are used.
        sinks: first positions of a sequence that every row sees as well.
    """

    def __init__(self, batch: int, window: int, like_GD: Tensor, *, sinks: int = 0) -> None:
        heads, dim = like_GD.shape
        self.window, self.sinks, self.nodes = window, sinks, 0
        # Zeros, not empty: a masked row has weight 0, and 0 times garbage may be NaN.
        self.k_BGSD = like_GD.new_zeros(batch, heads, sinks + window, dim)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)
        self.since_B = torch.zeros(batch, dtype=torch.int64, device=like_GD.device)
        self._none_B = torch.zeros_like(self.since_B)

    def serves(self, batch: int, like_GD: Tensor) -> bool:
        """Whether its buffers are those of so many sequences, and of this device and dtype."""
        k = self.k_BGSD
        return (len(k), k.device, k.dtype) == (batch, like_GD.device, like_GD.dtype)

    def begin(self, since_B: Tensor) -> None:
        """Hold nothing; the next position of each sequence (beside sinks) will be `since_B`."""
        self.since_B.copy_(since_B)

    def reserve(self, nodes: int) -> None:
        """Make room for trees of this many nodes; nothing happens where it is there already."""
        more = nodes - self.nodes
        if more > 0:
            B, G, _, D = self.k_BGSD.shape
            room = self.k_BGSD.new_zeros(B, G, more, D)
            self.k_BGSD, self.v_BGSD = (torch.cat((x, room), dim=2) for x in (self.k_BGSD, self.v_BGSD))
            self.nodes = nodes

    def positions(self, first_B: Tensor, count_B: Tensor) -> Slots:
        """Where keys and values of `count_B` positions from `first_B` on go, over those W positions earlier.

        Rows of a step beyond `count_B` are not stored; a step has at most W.
        """
        return Slots(self.k_BGSD, self.v_BGSD, first_B, wrap=self.window, count_B=count_B, fixed=self.sinks)

    def tree(self, first: int, len_B: Tensor) -> Slots:
        """Where keys and values of tree nodes `first, first + 1, ...` go; the next tree overwrites them."""
        return Slots(self.k_BGSD, self.v_BGSD, self._none_B, at=self.sinks + self.window + first)

    def attend(self, q_BPHD: Tensor, len_B: Tensor, nodes_BPN: Tensor, *, ahead: int, scale: float) -> Tensor:
        """Attention of tree nodes over the ring (the last W positions before each) and over the tree.

        Args:
            q_BPHD: rotated queries.
            len_B: tokens of each sequence, all of which were taken in.
            nodes_BPN: bool; which of the tree's first N nodes each sees, itself among them.
            ahead: how far beyond those tokens the nodes are; all are of one level.
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
        """What drafting reads and writes, all in place."""
        return self.k_BGSD, self.v_BGSD, self.since_B

    def bytes(self) -> int:
        """Bytes of keys, values and positions."""
        return self.k_BGSD.nbytes + self.v_BGSD.nbytes + self.since_B.nbytes + self._none_B.nbytes
