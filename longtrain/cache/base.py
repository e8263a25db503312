"""The contract of every KV cache: a committed prefix and a tail of rows not yet accepted.

Shapes: B batch, T new rows, S committed rows, N tree nodes, P path, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.tree_attention import CAUSAL, Causal, tree_bits

__all__ = ["Causal", "KVCache", "KernelMask", "Mask", "PrefixOnly", "Tree"]


@dataclass(frozen=True)
class Tree:
    """Row i sees the prefix and the tail rows j with `visible_BNN[b, i, j]` (ancestor or self)."""

    visible_BNN: Tensor


@dataclass(frozen=True)
class PrefixOnly:
    """Rows see the committed prefix, nothing of the tail, and write no K, V (a draft's cross-attention)."""


Mask: TypeAlias = Causal | Tree | PrefixOnly


class KernelMask:
    """Masks as the kernels take them; the bits of a tree are made once a step, for all layers."""

    def __init__(self) -> None:
        self._bits: tuple[Tree, Tensor] | None = None

    def of(self, mask: Mask) -> Tensor | Causal | None:
        """Bits of a tree, `CAUSAL`, or None for the prefix alone."""
        if isinstance(mask, Causal):
            return CAUSAL
        if isinstance(mask, PrefixOnly):
            return None
        if self._bits is None or self._bits[0] is not mask:
            self._bits = (mask, tree_bits(mask.visible_BNN))
        return self._bits[1]

    def forget(self) -> None:
        """Let go of the bits: the step is over."""
        self._bits = None


class KVCache(ABC):
    """K and V of every layer of one batch. The attention hook is its only writer.

    A step writes T tail rows at every layer (`write`), attends (`attend`), and ends with `commit`, which
    moves the accepted rows to the end of the prefix and forgets the others: that is the whole of rollback.
    """

    len_B: Tensor
    """Committed positions of each sequence, int64, on the device; the next token's position."""

    @abstractmethod
    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store tail rows 0..T-1 of a layer, over whatever tail was there. K is post-RoPE."""

    @abstractmethod
    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention of the new rows over prefix and tail.

        Returns:
            out_BHTD in q's dtype, and the natural-log lse_BHT in fp32 where the implementation has it, else
            None. A row that sees nothing gives zeros.
        """

    def tail_slots(self, layer: int, rows: int) -> Slots | None:
        """Where a layer's `rows` tail rows go, for a caller that stores them itself instead of `write`.

        None: they go through `write`.
        """
        return None

    def expect(self, n_B: Tensor | None) -> None:  # noqa: B027 (most caches need not know)
        """Told before a forward how many of its rows are valid in each sequence; None: all of them."""

    def foresee(self, rows: int) -> None:  # noqa: B027 (most caches have all their room from the start)
        """Told by the host before a recorded cycle, which runs without it, commits at most so many rows."""

    def commit_limit(self) -> Tensor | None:
        """Most rows of each sequence, int64_B, that the next commit may take; None: all of a step's."""
        return None

    def step_limit(self) -> int | None:
        """Most rows of a step over a committed prefix; None: as many as there is room for."""
        return None

    @abstractmethod
    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Accept tail rows: `path_BP[b, :n_B[b]]` in order, or rows 0..n_B[b]-1 when `path_BP` is None."""

    def rows_left(self) -> int | None:
        """Rows of each sequence that can follow the committed ones, as far as the host knows; None: any."""
        return None

    @abstractmethod
    def bytes(self) -> int:
        """Bytes of storage held, everything counted."""

    def free(self) -> None:
        """Give the storage back although a draft or a graph still knows this cache; it is of no use then."""
        for tensor in self.tensors() or ():
            tensor.untyped_storage().resize_(0)

    def tensors(self) -> tuple[Tensor, ...] | None:
        """What decoding steps read and write, where they do so in place and ask the host nothing; else None.

        A CUDA graph of a step is good as long as these tensors are the same objects.
        """
        return None
