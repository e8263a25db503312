"""Attention over one packed sequence of documents that captures the K and V of some layers.

Shapes: T tokens of the sequence, H query heads, G KV heads, D head dim. The batch is 1.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask
from longtrain.errors import ConflictError
from longtrain.kernels.attention.packed import packed_attention, packed_lse
from longtrain.kernels.attention.segments import by_sequence, end_to_end


class PackedCapture(KVCache):
    """Causal attention within each document, without a prefix; captures the K and V of some layers.

    Args:
        bounds: document bounds from 0 to T; document d is `bounds[d]:bounds[d + 1]`.
        layers: the layers to capture.
        device: the device of the (empty) lengths.
    """

    def __init__(self, bounds: tuple[int, ...], *, layers: Collection[int], device: torch.device) -> None:
        self.bounds = bounds
        self.layers = layers
        self.len_B = torch.zeros(1, dtype=torch.int64, device=device)
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer -> (k_TGD, v_TGD) of the captured layers."""
        self._now: tuple[int, Tensor, Tensor] | None = None

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store this layer's K and V until the next layer's, or permanently if the layer is captured."""
        k_TGD, v_TGD = end_to_end(k_BGTD), end_to_end(v_BGTD)
        self._now = (layer, k_TGD, v_TGD)
        if layer in self.layers:
            self.kv[layer] = alone(k_TGD), alone(v_TGD)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Document-isolated causal attention.

        Raises:
            ConflictError: the mask is not causal, or K and V of this layer were not written.
        """
        return self._attend(q_BHTD, scale, None), None

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`, and `attend`."""
        return self._attend(q_BHTD, scale, window - 1), None

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        assert self._now is not None
        before = window - 1 if window else None
        lse_TH = packed_lse(
            end_to_end(q_BHTD), self._now[1], self.bounds, self.bounds, scale=scale, window=before
        )
        return self._attend(q_BHTD, scale, before), by_sequence(lse_TH, 1)

    def _attend(self, q_BHTD: Tensor, scale: float, before: int | None) -> Tensor:
        """Attention over a token's own key and `before` earlier ones; None: all."""
        assert self._now is not None
        _, k_TGD, v_TGD = self._now
        q_THD = end_to_end(q_BHTD)
        out_THD = packed_attention(q_THD, k_TGD, v_TGD, self.bounds, self.bounds, scale=scale, window=before)
        return by_sequence(out_THD, 1)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Refused: a packed sequence has no prefix (ConflictError)."""
        raise ConflictError(
            "a packed sequence is one forward and has no prefix to commit to; use a DenseCache to decode"
        )

    def bytes(self) -> int:
        """Bytes of the captured K and V."""
        return sum(k_TGD.nbytes + v_TGD.nbytes for k_TGD, v_TGD in self.kv.values())


def alone(x: Tensor) -> Tensor:
    """The tensor, copied if it is a view of a larger one, which would stay in memory with it."""
    return x if x.untyped_storage().nbytes() <= x.nbytes else x.clone()
