"""Hierarchical caches of targets with sliding windows, whose windowed layers store their window unquantised.

Shapes: B batch, T new tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.window import WindowCache
from longtrain.kernels.tree_attention import CAUSAL


def new_quantised(
    kind: type[HierarchicalCache],
    *,
    n_heads: int,
    windows: Sequence[int],
    options: dict[str, Any],
    **size: Any,
) -> HierarchicalCache | LayeredCache:
    """Return an empty cache that quantises the layers that see the whole text.

    Args:
        kind: the hierarchical cache of those layers.
        n_heads: number of query heads.
        windows: window of each layer, 0 for one that sees the whole text; there is one.
        options: further arguments of `kind`.
        size: arguments that `kind` and `WindowCache` share, without the number of layers.
    """
    full = [layer for layer, window in enumerate(windows) if not window]
    quantised = kind(n_layers=len(full), n_heads=n_heads, numbers=full, **options, **size)
    if len(full) == len(windows):
        return quantised
    near = [window for window in windows if window]
    return LayeredCache(quantised, WindowCache(n_layers=len(near), windows=near, **size), windows)


class LayeredDraftView(KVCache):
    """A draft's view of a cache of two: as `DraftView` of the layers that see the whole text.

    In layers with a window the entries that were drafted so far are written again with each new one, as the
    tail of a chain, so that nothing of them is committed; the target's own step overwrites it.

    Args:
        cache: the cache, whose `full` is hierarchical.
        windows: window of each layer; 0: none.
        bits: bits at which quantised tokens are read.
    """

    def __init__(self, cache: LayeredCache, windows: Sequence[int], bits: int) -> None:
        assert isinstance(cache.full, HierarchicalCache)
        self._near, self._full = cache.near, cache.full.draft_view(bits)
        kinds = [window > 0 for window in windows]
        self._at = [kinds[:layer].count(kind) for layer, kind in enumerate(kinds)]
        self._windows = windows
        self.restart()

    @property
    def len_B(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        """Positions of each sequence, drafted ones included."""
        return self._full.len_B

    def restart(self) -> None:
        """See `DraftView`."""
        self._full.restart()
        self._drafted: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `DraftView`."""
        at = self._at[layer]
        if not self._windows[layer]:
            self._full.write(at, k_BGTD, v_BGTD)
            return
        if layer in self._drafted:
            k_BGTD, v_BGTD = (
                torch.cat(pair, 2) for pair in zip(self._drafted[layer], (k_BGTD, v_BGTD), strict=True)
            )
        self._drafted[layer] = k_BGTD, v_BGTD
        self._near.write(at, k_BGTD, v_BGTD)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `DraftView`."""
        return self._full.attend(self._at[layer], q_BHTD, mask=mask, scale=scale)

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`."""
        before, whole_BHTD = self._chain(layer, q_BHTD)
        at = self._at[layer]
        out, lse = self._near.attend_window(at, whole_BHTD, mask=CAUSAL, scale=scale, window=window)
        return out[:, :, before:], None if lse is None else lse[:, :, before:]

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        if not window:
            return self._full.attend_lse(self._at[layer], q_BHTD, mask=mask, scale=scale)
        before, whole_BHTD = self._chain(layer, q_BHTD)
        at = self._at[layer]
        out, lse = self._near.attend_lse(at, whole_BHTD, mask=CAUSAL, scale=scale, window=window)
        return out[:, :, before:], lse[:, :, before:]

    def _chain(self, layer: int, q_BHTD: Tensor) -> tuple[int, Tensor]:
        """Put zeros in the place of the queries of earlier drafted tokens, whose outputs are dropped.

        Returns:
            the number of these tokens, and the queries of all drafted tokens.
        """
        B, H, T, D = q_BHTD.shape
        before = self._drafted[layer][0].shape[2] - T
        return before, torch.cat((q_BHTD.new_zeros(B, H, before, D), q_BHTD), 2)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `DraftView`."""
        self._full.commit(path_BP, n_B)

    def bytes(self) -> int:
        """Always 0: the view stores nothing from one chain to the next."""
        return 0
