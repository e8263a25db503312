"""A cache of two: layers that see the whole text in one, layers with a sliding window in another.

Shapes: L layers, B batch, T new tokens, S cache positions, P path, G KV heads, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask
from longtrain.cache.dense import DenseCache
from longtrain.kernels.fused_layer import Slots


class LayeredCache(KVCache):
    """Whatever is done to the entries of full layers (eviction, say) leaves those of window layers alone.

    Args:
        full: cache of the layers that see the whole text; its positions are the sequences'.
        near: cache of the layers with a window. Its lengths may be smaller: only distances count there.
        windows: window of each layer of the target; 0: none.
    """

    def __init__(self, full: KVCache, near: DenseCache, windows: Sequence[int]) -> None:
        self.full, self.near = full, near
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

    def room_left(self) -> int | None:
        """See `KVCache`."""
        left = self.full.room_left()
        return self.near.room_left() if left is None else min(left, self.near.room_left())

    def bytes(self) -> int:
        """Bytes of both caches."""
        return self.full.bytes() + self.near.bytes()

    def free(self) -> None:
        """See `KVCache`."""
        self.full.free()
        self.near.free()


def last_entries(
    cache: DenseCache, layers: Sequence[int], lengths: Sequence[int], *, room: int
) -> DenseCache:
    """Copy what later tokens see of some layers with a window: the last entries of each prompt.

    Args:
        cache: committed prompts, with the `windows` of its layers.
        layers: the layers, all with a window.
        lengths: tokens of each prompt, on the host.
        room: capacity after the prompts.
    """
    before = max(max(cache.windows[layer] for layer in layers) - 1, 1)
    counts = [min(before, length) for length in lengths]
    _, B, G, _, D = cache.k_LBGSD.shape
    near = DenseCache(
        n_layers=len(layers),
        n_kv_heads=G,
        head_dim=D,
        batch=B,
        max_tokens=max(counts) + room,
        max_nodes=0,
        device=cache.k_LBGSD.device,
        dtype=cache.k_LBGSD.dtype,
        windows=[cache.windows[layer] for layer in layers],
    )
    starts = torch.tensor([n - m for n, m in zip(lengths, counts, strict=True)])
    at_BS = starts[:, None] + torch.arange(max(counts))
    at_BS = at_BS.clamp(max=max(lengths) - 1).to(cache.k_LBGSD.device, non_blocking=True)
    index = at_BS[:, None, :, None].expand(-1, G, -1, D)
    for own, layer in enumerate(layers):
        near.k_LBGSD[own, :, :, : max(counts)] = cache.k_LBGSD[layer].gather(2, index)
        near.v_LBGSD[own, :, :, : max(counts)] = cache.v_LBGSD[layer].gather(2, index)
    near.rewind(counts)
    return near
