"""The draft's own keys and values: the last W positions in a ring, and the nodes of one tree behind it.

Shapes: B batch, W window, N tree nodes, P new positions, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_NEVER = -(1 << 62)
"""Position of a slot that holds nothing: outside every window."""


class Ring:
    """Constant-size storage; a position lives in slot `position mod W`, visibility goes by position.

    Buffer rows 0..W-1 are the ring, row W takes writes that must not count, and the tree's nodes follow.

    Args:
        batch: sequences.
        window: previous positions a row sees.
        like_GD: an empty tensor [G, D] whose device and dtype are used.
    """

    def __init__(self, batch: int, window: int, like_GD: Tensor) -> None:
        heads, dim = like_GD.shape
        self.window, self.nodes = window, 0
        # Zeros, not empty: a masked row has weight 0, and 0 times garbage may be NaN.
        self.k_BGSD = like_GD.new_zeros(batch, heads, window + 1, dim)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)
        self.pos_BS = torch.full((batch, window + 1), _NEVER, dtype=torch.int64, device=like_GD.device)

    def serves(self, batch: int, like_GD: Tensor) -> bool:
        """Whether its buffers are those of so many sequences, and of this device and dtype."""
        k = self.k_BGSD
        return (len(k), k.device, k.dtype) == (batch, like_GD.device, like_GD.dtype)

    def clear(self) -> None:
        """Forget every position; the buffers stay."""
        self.pos_BS.fill_(_NEVER)

    def reserve(self, nodes: int) -> None:
        """Make room for trees of this many nodes; nothing happens where it is there already."""
        more = nodes - self.nodes
        if more > 0:
            B, G, _, D = self.k_BGSD.shape
            room = self.k_BGSD.new_zeros(B, G, more, D)
            self.k_BGSD, self.v_BGSD = (torch.cat((x, room), dim=2) for x in (self.k_BGSD, self.v_BGSD))
            self.nodes = nodes

    def put(self, pos_BP: Tensor, valid_BP: Tensor, k_BPGD: Tensor, v_BPGD: Tensor) -> None:
        """Store keys and values at positions, over those W positions earlier; P is at most W.

        Args:
            pos_BP: absolute positions, int64, increasing.
            valid_BP: bool; the others are not stored.
            k_BPGD: rotated keys.
            v_BPGD: values.
        """
        slot_BP = torch.where(valid_BP, pos_BP % self.window, self.window)
        self.pos_BS.scatter_(1, slot_BP, pos_BP)
        self.pos_BS[:, self.window] = _NEVER
        slot_BGPD = slot_BP[:, None, :, None].expand(-1, k_BPGD.shape[2], -1, k_BPGD.shape[3])
        self.k_BGSD.scatter_(2, slot_BGPD, k_BPGD.transpose(1, 2))
        self.v_BGSD.scatter_(2, slot_BGPD, v_BPGD.transpose(1, 2))

    def put_nodes(self, first: int, k_BPGD: Tensor, v_BPGD: Tensor) -> None:
        """Store tree nodes `first, first + 1, ...`; they are overwritten by the next tree."""
        rows = slice(self.window + 1 + first, self.window + 1 + first + k_BPGD.shape[1])
        self.k_BGSD[:, :, rows] = k_BPGD.transpose(1, 2)
        self.v_BGSD[:, :, rows] = v_BPGD.transpose(1, 2)

    def attend(self, q_BPHD: Tensor, pos_B1: Tensor, nodes_BPN: Tensor, *, scale: float) -> Tensor:
        """Attention of tree nodes over the ring (the last W positions before each) and over the tree.

        Args:
            q_BPHD: rotated queries.
            pos_B1: their position; all are of one level.
            nodes_BPN: bool; which of the tree's first N nodes each sees, itself among them.
            scale: of the logits.

        Returns: out_BPHD.
        """
        B, P, H, D = q_BPHD.shape
        G, used = self.k_BGSD.shape[1], self.window + 1 + nodes_BPN.shape[-1]
        ring_BS = self.pos_BS >= pos_B1 - self.window
        seen_BPS = torch.cat((ring_BS[:, None].expand(-1, P, -1), nodes_BPN), dim=-1)
        # The query heads of a KV head become rows of one matrix, so keys are read once and never repeated.
        q_BGRD = q_BPHD.transpose(1, 2).reshape(B, G, -1, D)
        seen_BGRS = seen_BPS[:, None, None].expand(-1, 1, H // G, -1, -1).reshape(B, 1, -1, used)
        k, v = self.k_BGSD[:, :, :used], self.v_BGSD[:, :, :used]
        out_BGRD = scaled_dot_product_attention(q_BGRD, k, v, attn_mask=seen_BGRS, scale=scale)
        return out_BGRD.reshape(B, H, P, D).transpose(1, 2)

    def bytes(self) -> int:
        """Bytes of keys, values and positions."""
        return self.k_BGSD.nbytes + self.v_BGSD.nbytes + self.pos_BS.nbytes
