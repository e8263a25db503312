"""A cache of two: layers that see the whole text in one, layers with a sliding window in another.

Shapes: L layers, B batch, T new tokens, S cache positions, P path, G KV heads, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.window import WindowCache
from longtrain.kernels.fused_layer import Slots


class LayeredCache(KVCache):
    """Whatever is done to the entries of full layers (eviction, say) leaves those of window layers alone.

    Args:
        full: cache of the layers that see the whole text; its positions are the sequences'.
        near: cache of the layers with a window (`WindowCache`, or an arena over one).
        windows: window of each layer of the target; 0: none.
    """

    def __init__(self, full: KVCache, near: KVCache, windows: Sequence[int]) -> None:
        self.full, self.near, self.windows = full, near, tuple(windows)
        counts = [0, 0]
        self._at: list[tuple[KVCache, int]] = []
        for window in windows:
            kind = int(window > 0)
            self._at.append(((full, near)[kind], counts[kind]))
            counts[kind] += 1

    @property
    def len_B(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        """Committed positions of each sequence."""
        return self.full.len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `KVCache`."""
        cache, at = self._at[layer]
        cache.write(at, k_BGTD, v_BGTD)

    def tail_slots(self, layer: int, rows: int) -> Slots | None:
        """See `KVCache`."""
        cache, at = self._at[layer]
        return cache.tail_slots(at, rows)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`."""
        cache, at = self._at[layer]
        return cache.attend(at, q_BHTD, mask=mask, scale=scale)

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`."""
        cache, at = self._at[layer]
        return cache.attend_window(at, q_BHTD, mask=mask, scale=scale, window=window)

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        cache, at = self._at[layer]
        return cache.attend_lse(at, q_BHTD, mask=mask, scale=scale, window=window)

    def expect(self, n_B: Tensor | None) -> None:
        """See `KVCache`."""
        self.full.expect(n_B)
        self.near.expect(n_B)

    def foresee(self, rows: int) -> None:
        """See `KVCache`."""
        self.full.foresee(rows)
        self.near.foresee(rows)

    def commit_limit(self) -> Tensor | None:
        """See `KVCache`."""
        return self.full.commit_limit()

    def step_limit(self) -> int | None:
        """See `KVCache`."""
        return self.full.step_limit()

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`."""
        self.full.commit(path_BP, n_B)
        self.near.commit(path_BP, n_B)

    def rewind(self, lengths: Sequence[int]) -> None:
        """See `DenseCache` and `WindowCache`, of which both caches are."""
        assert isinstance(self.full, DenseCache) and isinstance(self.near, DenseCache)
        self.full.rewind(lengths)
        self.near.rewind(lengths)

    def room_left(self) -> int | None:
        """See `KVCache`."""
        left = [room for room in (self.full.room_left(), self.near.room_left()) if room is not None]
        return min(left, default=None)

    def bytes(self) -> int:
        """Bytes of both caches."""
        return self.full.bytes() + self.near.bytes()

    def tensors(self) -> tuple[Tensor, ...] | None:
        """See `KVCache`."""
        full, near = self.full.tensors(), self.near.tensors()
        return None if full is None or near is None else (*full, *near)

    def free(self) -> None:
        """See `KVCache`."""
        self.full.free()
        self.near.free()


def new_cache(*, n_layers: int, windows: Sequence[int], **sizes: Any) -> DenseCache | LayeredCache:
    """An empty cache that stores of each layer what its window lets later tokens see.

    Args:
        n_layers: number of layers.
        windows: window of each; 0: it sees the whole text.
        sizes: as for `DenseCache`.

    Raises:
        ConfigError: as of `DenseCache`.
    """
    near = [window for window in windows if window]
    if not near:
        return DenseCache(n_layers=n_layers, **sizes)
    last = WindowCache(n_layers=len(near), windows=near, **sizes)
    if len(near) == n_layers:
        return last
    return LayeredCache(DenseCache(n_layers=n_layers - len(near), **sizes), last, windows)


def last_entries(
    cache: DenseCache, layers: Sequence[int], lengths: Sequence[int], *, room: int, nodes: int | None = None
) -> WindowCache:
    """Copy what later tokens see of some layers with a window: the last entries, in whole tiles.

    Args:
        cache: committed prompts, with the `windows` of its layers.
        layers: the layers, all with a window.
        lengths: tokens of each prompt, on the host.
        room: positions after the prompts, and the most tokens of a step.
        nodes: the most tokens of a step; None: `room`, so that no entry is dropped.
    """
    _, _, G, _, D = cache.k_LBGSD.shape
    nodes = room if nodes is None else nodes
    near = WindowCache(
        n_layers=len(layers),
        max_tokens=max(lengths) + room - nodes,
        max_nodes=nodes,
        windows=[cache.windows[layer] for layer in layers],
        **cache.sizes,
    )
    starts = near.first_kept(torch.tensor(lengths))
    most = int((torch.tensor(lengths) - starts).max())
    at_BS = starts[:, None] + torch.arange(most)
    at_BS = at_BS.clamp(max=max(lengths) - 1).to(cache.k_LBGSD.device, non_blocking=True)
    index = at_BS[:, None, :, None].expand(-1, G, -1, D)
    for own, layer in enumerate(layers):
        near.k_LBGSD[own, :, :, :most] = cache.k_LBGSD[layer].gather(2, index)
        near.v_LBGSD[own, :, :, :most] = cache.v_LBGSD[layer].gather(2, index)
    near.resume(lengths)
    return near
