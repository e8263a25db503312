"""A draft's own keys and values for every position, followed by the nodes of one tree.

Shapes: B batch, S buffer positions, N tree nodes, P new positions, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.cache.arena import rounded_slots
from longtrain.cache.room import check_room
from longtrain.errors import ConfigError
from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.tree_attention import CAUSAL, MAX_NODES, tree_attention, tree_bits


class DraftHistory:
    """Storage for drafts without a window, with the interface of `DraftRing`; lengths are on the device only.

    Args:
        batch: sequences.
        positions: most positions of a sequence; there is room for a tree after them.
        like_GD: an empty tensor [G, D] with the device and dtype.

    Raises:
        NoRoomError: there is too little memory.
    """

    def __init__(self, batch: int, positions: int, like_GD: Tensor) -> None:
        heads, dim = like_GD.shape
        slots = rounded_slots(positions + MAX_NODES)
        needed = 2 * like_GD.itemsize * batch * heads * slots * dim
        check_room(needed, like_GD.device, what="the K and V of a draft", batch=batch, tokens=slots)
        # Zeros, not empty: a masked position has weight 0, and 0 times garbage may be NaN.
        self.k_BGSD = like_GD.new_zeros(batch, heads, slots, dim)
        self.v_BGSD = like_GD.new_zeros(batch, heads, slots, dim)

    def serves(self, batch: int, positions: int, like_GD: Tensor) -> bool:
        """True if its batch size, capacity, device and dtype fit."""
        k = self.k_BGSD
        like = (len(k), k.device, k.dtype) == (batch, like_GD.device, like_GD.dtype)
        return like and k.shape[2] >= positions + MAX_NODES

    def reserve(self, nodes: int) -> None:
        """Refuse trees of more nodes than there is room for.

        Raises:
            ConfigError: a tree of too many nodes.
        """
        if nodes > MAX_NODES:
            raise ConfigError(
                f"a tree of {nodes} nodes for a draft without a window; allowed: up to {MAX_NODES}"
            )

    def positions(self, first_B: Tensor, count_B: Tensor) -> Slots:
        """Buffer positions of `count_B` tokens from position `first_B` on; tokens beyond are not stored."""
        return Slots(self.k_BGSD, self.v_BGSD, first_B, count_B=count_B)

    def tree(self, first: int, len_B: Tensor) -> Slots:
        """Buffer positions of tree nodes `first, first + 1, ...`, after `len_B` positions."""
        return Slots(self.k_BGSD, self.v_BGSD, len_B, at=first)

    def attend(self, q_BPHD: Tensor, len_B: Tensor, nodes_BPN: Tensor, *, ahead: int, scale: float) -> Tensor:
        """Attention of tree nodes over all positions and over the tree; see `DraftRing.attend`."""
        nodes = nodes_BPN.shape[-1]
        if nodes > ahead + 1:
            return self.attend_lse(q_BPHD.transpose(1, 2), len_B, nodes_BPN, scale=scale)[0].transpose(1, 2)
        # a chain so far: each node sees all before it
        k, v = self.k_BGSD, self.v_BGSD
        out, _ = tree_attention(q_BPHD.transpose(1, 2), k, v, len_B, CAUSAL, scale=scale, base=ahead)
        return out.transpose(1, 2)

    def attend_lse(
        self, q_BHPD: Tensor, len_B: Tensor, nodes_BPN: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `attend` under the mask, with heads before positions: out_BHPD and the lse."""
        k, v, nodes = self.k_BGSD, self.v_BGSD, nodes_BPN.shape[-1]
        return tree_attention(q_BHPD, k, v, len_B, tree_bits(nodes_BPN), scale=scale, nodes=nodes)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that drafting reads and writes in place."""
        return self.k_BGSD, self.v_BGSD

    def bytes(self) -> int:
        """Bytes of keys and values."""
        return self.k_BGSD.nbytes + self.v_BGSD.nbytes
