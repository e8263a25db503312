"""All KV entries in pinned host memory, and those of some layers in pages on the device as well.

Entries are written to both, so a layer is offloaded by giving its pages to other layers, without a copy. On
the host a token's entries of a few layers are contiguous. If these layers read the same set, one launch loads
them all: the bus transfers a limited number of separate pieces per second, however short they are.

Source: SpeContext (arXiv 2512.00722) §6, Algorithm 2.

Shapes: L layers, N blocks of layers, P layers of a block, B batch, G KV heads, S positions of a sequence, C
pages of a layer, E numbers of an entry (K and V, 2 D), T new tokens, J slots, M index pairs of a list.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from longtrain.cache.pinned import lent
from longtrain.cache.room import check_room
from longtrain.errors import ConfigError
from longtrain.kernels.entry_moves import EntryLists, Pages, Programs, move_entries

WAITED = Programs(8, numbers=16384)
"""For loads that the step waits for. With scattered entries more programs are slower."""


def beside(rows: int) -> Programs:
    """Kernel programs for loads beside a step: no more than load its entries in time.

    Args:
        rows: number of entries of a layer's sets, of all heads and sequences.
    """
    return Programs(min(64, max(4, rows // 1024)))


class HostStore:
    """Storage of all entries; layers are offloaded in reverse order of `keep`.

    Args:
        shape: L, B, G, S, E.
        pages: number of device pages, each with `page_entries` entries of one layer, of all sequences.
        page_entries: number of entries of a page.
        keep: all layers, those that stay on the device longest first.
        side_by_side: number of layers whose entries of a token are contiguous on the host; P is its greatest
            common divisor with L.
        device: device of the pages.
        dtype: dtype of the entries.

    Raises:
        ConfigError: too little memory on host or device, or host memory that the device cannot read.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        *,
        pages: int,
        page_entries: int,
        keep: Sequence[int],
        side_by_side: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        L, B, G, S, E = shape
        per_layer, self._block = -(-S // page_entries), math.gcd(L, side_by_side)
        blocks = (L // self._block, B, G, S, self._block, E)
        needed = L * B * G * S * E * dtype.itemsize
        if device.type == "cuda":
            self.host_NBGSPE = lent(self, needed, batch=B, tokens=S).view(dtype).view(blocks)
        else:
            check_room(needed, "cpu", what="the host's copy of a KV cache", batch=B, tokens=S)
            self.host_NBGSPE = torch.zeros(blocks, dtype=dtype)
        self.pool_BGRE = torch.zeros(B, G, pages * page_entries, E, dtype=dtype, device=device)
        self.pages = Pages(torch.full((L, per_layer), -1, dtype=torch.int64, device=device), page_entries)
        self.on_host_L = torch.ones(L, dtype=torch.int64, device=device)
        """1 for layers whose entries are loaded from the host, possibly because others of their run are."""
        self.runs = [slice(layer, layer + 1) for layer in range(L)]
        """Runs of layers that one launch loads; see `share`."""
        self.first_LG = torch.zeros(L, G, dtype=torch.int64, device=device)
        """Index list 0 for every head."""
        self._keep = list(keep)
        self._free = list(range(pages))
        self._held: dict[int, list[int]] = {layer: [] for layer in self._keep}
        self._n_pages, self._per_layer = pages, per_layer
        self._ready = 0
        self.make_room(1)
        if len(self._held) == self.most_resident(S):  # none will have to leave
            self.make_room(S)

    @property
    def resident(self) -> list[int]:
        """Layers that are on the device as well as on the host."""
        return [layer for layer in self._keep if layer in self._held]

    @property
    def still(self) -> bool:
        """True if no further page will be needed, so that no other layer will be offloaded."""
        return self._ready == self._per_layer

    def most_resident(self, rows: int) -> int:
        """Number of layers that fit on the device with so many entries of each sequence."""
        return min(len(self._keep), self._n_pages // max(1, -(-rows // self.pages.size)))

    def make_room(self, rows: int) -> bool:
        """Give pages for `rows` entries to all resident layers; offloads some of them if pages run out.

        Returns:
            True if a layer was offloaded.

        Raises:
            ConfigError: more entries than there is room for on the host.
        """
        wanted, before = -(-rows // self.pages.size), len(self._held)
        if wanted <= self._ready:
            return False
        if wanted > self._per_layer:
            raise ConfigError(f"cache is full: {rows} entries, room for {self._per_layer * self.pages.size}")
        for layer in self.resident[self.most_resident(rows) :]:
            self._free += self._held.pop(layer)
            self.pages.at_LC[layer] = -1
        for layer, held in self._held.items():
            new = [self._free.pop() for _ in range(wanted - len(held))]
            self.pages.at_LC[layer, len(held) : wanted] = torch.tensor(new).to(self.pages.at_LC.device)
            held += new
        self._ready = wanted if self._held else self._per_layer
        self._mark_away()
        return len(self._held) != before

    def share(self, table_LG: Tensor, dense_layers: Collection[int]) -> None:
        """Load neighbouring layers of a block that read the same sets with one launch.

        Args:
            table_LG: index of the set that each KV head of each layer reads.
            dense_layers: layers that read everything.
        """
        sets = table_LG.tolist()
        kinds = groupby(
            range(len(sets)), lambda layer: (layer // self._block, layer in dense_layers, sets[layer])
        )
        runs = [(dense, list(run)) for (_, dense, _), run in kinds]
        self.runs = [slice(run[0], run[-1] + 1) for dense, run in runs if not dense]
        self._mark_away()

    def _mark_away(self) -> None:
        """Update `on_host_L` from the layers that have pages."""
        away = [layer not in self._held for layer in range(len(self.on_host_L))]
        for run in self.runs:
            away[run] = [any(away[run])] * len(away[run])
        self.on_host_L.copy_(torch.tensor(away))

    def _on_host(self, layers: slice) -> Tensor:
        """View of some layers of one block, [1, B, G, S, P, E] with P layers."""
        block, first = divmod(layers.start, self._block)
        return self.host_NBGSPE[block : block + 1, :, :, :, first : first + layers.stop - layers.start]

    def write(self, layer: int, rows_BGTE: Tensor, to_BT: Tensor) -> None:
        """Write new entries of a layer."""
        T = rows_BGTE.shape[2]
        from_B1T = torch.arange(T, device=to_BT.device).expand(len(to_BT), 1, T)
        lists = EntryLists(to_BT[:, None], from_B1T, self.first_LG[:1])
        move_entries(self._on_host(slice(layer, layer + 1)), rows_BGTE[None], lists)
        if layer in self._held:
            pages = Pages(self.pages.at_LC[layer : layer + 1], self.pages.size)
            move_entries(self.pool_BGRE[None], rows_BGTE[None], lists, goal_pages=pages)

    def write_all(self, source_LBGJE: Tensor, to_BP: Tensor, from_BP: Tensor, n_B: Tensor) -> None:
        """Write entries of all layers, the first `n_B` pairs of each list."""
        lists = EntryLists(to_BP[:, None], from_BP[:, None], self.first_LG, n_B[None, :, None])
        by_block = EntryLists(
            lists.to_BXM, lists.from_BXM, self.first_LG[: len(self.host_NBGSPE)], lists.n_LBX
        )
        move_entries(self.host_NBGSPE, _side_by_side(source_LBGJE, self._block), by_block)
        if self._held:
            pool = self.pool_BGRE.expand(len(source_LBGJE), *self.pool_BGRE.shape)
            move_entries(pool, source_LBGJE, lists, goal_pages=self.pages)

    def load(
        self,
        layers: slice,
        goal_LBGJE: Tensor,
        lists: EntryLists,
        n_host_LBX: Tensor,
        *,
        programs: Programs | None,
    ) -> None:
        """Load entries of some layers, from pages or from the host.

        Args:
            layers: one of `runs`, or one layer.
            goal_LBGJE: output, of these layers.
            lists: index pairs with their counts.
            n_host_LBX: the same counts for layers on the host, else 0; the same for each layer.
            programs: bounds the transfers from the host, see `move_entries`.
        """
        held = [layer in self._held for layer in range(len(self.on_host_L))[layers]]
        moving = bool(self._held) and not self.still
        if moving or any(held):
            pool = self.pool_BGRE.expand(len(held), *self.pool_BGRE.shape)
            pages = Pages(self.pages.at_LC[layers], self.pages.size)
            move_entries(goal_LBGJE, pool, lists, source_pages=pages)
        if moving or not all(held):
            away = EntryLists(lists.to_BXM, lists.from_BXM, lists.sets_LG[:1], n_host_LBX[:1])
            goal_1BGJPE = _side_by_side(goal_LBGJE, len(held))
            move_entries(goal_1BGJPE, self._on_host(layers), away, programs=programs)

    def whole(self, layer: int, n_B: Tensor) -> Tensor:
        """The first `n_B` entries of a layer as rows_BGSE on the device, zeros after them."""
        _, B, G, S, _, E = self.host_NBGSPE.shape
        found = torch.zeros(B, G, S, E, dtype=self.host_NBGSPE.dtype, device=n_B.device)
        at_B1S = torch.arange(S, device=n_B.device).expand(B, 1, S)
        n_LBX = n_B[None, :, None]
        lists, own = EntryLists(at_B1S, at_B1S, self.first_LG[:1], n_LBX), slice(layer, layer + 1)
        self.load(own, found[None], lists, n_LBX * self.on_host_L[layer], programs=None)
        return found

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that decoding steps read and write."""
        return self.host_NBGSPE, self.pool_BGRE, self.pages.at_LC, self.on_host_L


def _side_by_side(rows_LBGJE: Tensor, layers: int) -> Tensor:
    """View of layers grouped by `layers`, whose entries become parts of one: [N, B, G, J, P, E]."""
    return rows_LBGJE.unflatten(0, (-1, layers)).permute(0, 2, 3, 4, 1, 5)
