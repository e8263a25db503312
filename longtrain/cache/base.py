"""The interface of every KV cache: a committed prefix and a tail of entries that are not accepted yet.

Shapes: B batch, T new tokens, S committed entries, N tree nodes, P path, H query heads, G KV heads, D head
dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from longtrain.errors import ConflictError
from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.tree_attention import CAUSAL, Causal, tree_bits

__all__ = ["Causal", "KVCache", "KernelMask", "Mask", "PrefixOnly", "Tree"]


@dataclass(frozen=True)
class Tree:
    """Token i sees the prefix and the tail tokens j with `visible_BNN[b, i, j]` (ancestor or self)."""

    visible_BNN: Tensor


@dataclass(frozen=True)
class PrefixOnly:
    """Tokens see the committed prefix but not the tail, and write no K, V (a draft's cross-attention).

    Args:
        lse: True if the caller needs the lse, whatever the implementation.
    """

    lse: bool = False


Mask: TypeAlias = Causal | Tree | PrefixOnly


def depths(visible_BNN: Tensor) -> Tensor:
    """Depth of each node of a tree, int64_BN: its position is the prefix's length and its depth."""
    return visible_BNN.sum(-1) - 1


class KernelMask:
    """Converts masks for the kernels; the bits of a tree are computed once per step, for all layers."""

    def __init__(self) -> None:
        self._bits: tuple[Tree, Tensor] | None = None
        self._depths: tuple[Tree, Tensor] | None = None

    def of(self, mask: Mask) -> Tensor | Causal | None:
        """Bits of a tree, `CAUSAL`, or None for the prefix alone."""
        if isinstance(mask, Causal):
            return CAUSAL
        if isinstance(mask, PrefixOnly):
            return None
        if self._bits is None or self._bits[0] is not mask:
            self._bits = (mask, tree_bits(mask.visible_BNN))
        return self._bits[1]

    def depths(self, mask: Mask) -> Tensor | None:
        """Depths of a tree's nodes; None for other masks."""
        if not isinstance(mask, Tree):
            return None
        if self._depths is None or self._depths[0] is not mask:
            self._depths = (mask, depths(mask.visible_BNN))
        return self._depths[1]

    def forget(self) -> None:
        """Drop bits and depths at the end of a step."""
        self._bits = self._depths = None


class KVCache(ABC):
    """K and V of every layer for one batch. Only the attention hook writes to it.

    A step writes T tail entries at every layer (`write`), attends (`attend`), and ends with `commit`, which
    moves the accepted entries to the end of the prefix and drops the others. No other rollback is needed.
    """

    len_B: Tensor
    """Committed positions of each sequence, int64, on the device; the next token's position."""

    @abstractmethod
    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail entries 0..T-1 of a layer, overwriting any earlier tail. K is post-RoPE.

        Raises:
            ConfigError: the entries do not fit.
        """

    @abstractmethod
    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention of the new tokens over prefix and tail.

        Returns:
            out_BHTD in q's dtype, and the natural-log lse_BHT in fp32 if the implementation has it, else
            None. A token that sees nothing gives zeros.
        """

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor | None]:
        """As `attend`, of a layer whose tokens see the last `window` positions only, their own included.

        Raises:
            ConflictError: this kind of cache has no sliding windows.
        """
        raise ConflictError(
            f"a {type(self).__name__} reads all entries of layer {layer}, which has a sliding window of "
            f"{window} tokens; use a plain cache for this target"
        )

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, or `attend_window`, always with the lse, which is -inf for a token that sees nothing.

        Raises:
            ConflictError: this kind of cache does not give the lse.
        """
        if window:
            out, lse = self.attend_window(layer, q_BHTD, mask=mask, scale=scale, window=window)
        else:
            out, lse = self.attend(layer, q_BHTD, mask=mask, scale=scale)
        if lse is None:
            raise ConflictError(
                f"the target has attention sinks, which need the log-sum-exp of a token's scores, and a "
                f"{type(self).__name__} does not give it; use a plain cache for this target"
            )
        return out, lse

    def tail_slots(self, layer: int, rows: int) -> Slots | None:
        """Buffer positions of a layer's `rows` tail entries, for a caller that stores them itself.

        None: entries must be stored with `write`.

        Raises:
            ConfigError: the entries do not fit.
        """
        return None

    def expect(self, n_B: Tensor | None) -> None:  # noqa: B027 (most caches need not know)
        """Called before a forward with the number of valid tokens of each sequence; None: all of them."""

    def foresee(self, rows: int) -> None:  # noqa: B027 (most caches have all their room from the start)
        """Called on the host before a CUDA graph is replayed; the graph commits at most `rows` tokens."""

    def commit_limit(self) -> Tensor | None:
        """Most tokens of each sequence, int64_B, that the next commit may accept; None: no limit."""
        return None

    def step_limit(self) -> int | None:
        """Most tokens of a step over a committed prefix; None: as many as there is room for."""
        return None

    @abstractmethod
    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Accept tail entries `path_BP[b, :n_B[b]]` in order, or 0..n_B[b]-1 if `path_BP` is None."""

    def room_left(self) -> int | None:
        """Number of entries that fit after the committed ones, as far as the host knows; None: no limit."""
        return None

    @abstractmethod
    def bytes(self) -> int:
        """Bytes of all storage."""

    def free(self) -> None:
        """Free the storage even if a draft or a graph still refers to this cache, which is unusable then."""
        for tensor in self.tensors() or ():
            tensor.untyped_storage().resize_(0)

    def tensors(self) -> tuple[Tensor, ...] | None:
        """Tensors that decoding steps update in place, if these need no host synchronisation; else None.

        A CUDA graph of a step is valid as long as these tensors are the same objects.
        """
        return None
