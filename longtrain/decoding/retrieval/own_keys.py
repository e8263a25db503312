"""Selectors with a key of their own for every committed token.

Shapes: L layers that have such keys, B batch, S cache positions, G heads of them in a layer, D their dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.arena import rounded_slots
from longtrain.cache.room import check_room
from longtrain.decoding.retrieval.selector import Selector

if TYPE_CHECKING:
    from longtrain.cache.entry_sets import ReadBudget
    from longtrain.cache.selected import SelectedCache


class KeyedSelector(Selector):
    """Scores entries by keys of its own; the key of token s is at position s.

    Args:
        weight: a weight of the module that makes the keys; gives their dtype and device.
        budget: see `Selector`.
    """

    title = ""
    """Name of the module in messages, with its article."""

    def __init__(self, weight: Tensor, budget: ReadBudget) -> None:
        super().__init__(budget)
        self._weight = weight
        self.keys_LBSGD: Tensor | None = None

    def reserve(self, layers: int, batch: int, positions: int, heads: int, dim: int) -> Tensor:
        """Allocate key buffers. Reuses the previous ones if large enough: CUDA graphs have their addresses.

        Args:
            layers: L.
            batch: B.
            positions: most tokens of a sequence; S is larger: the last position takes invalid tokens.
            heads: G.
            dim: D.

        Raises:
            NoRoomError: there is too little memory.
        """
        slots, kept, weight = rounded_slots(positions + 1), self.keys_LBSGD, self._weight
        if kept is not None and kept.shape[1] == batch and kept.shape[2] >= slots:
            return kept
        self.keys_LBSGD = kept = None  # freed before the next one is allocated
        size = (layers, batch, slots, heads, dim)
        needed, what = math.prod(size) * weight.itemsize, f"the keys of {self.title}"
        check_room(needed, weight.device, what=what, batch=batch, tokens=slots)
        self.keys_LBSGD = weight.new_zeros(size)
        return self.keys_LBSGD

    def begun(self) -> tuple[Tensor, SelectedCache]:
        """The keys and the cache, once sequences were started."""
        assert self.keys_LBSGD is not None and self.cache is not None
        return self.keys_LBSGD, self.cache

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its keys."""
        return self._weight.dtype

    def bytes(self) -> int:
        """Bytes of its keys."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that steps update in place: its keys."""
        return () if self.keys_LBSGD is None else (self.keys_LBSGD,)
