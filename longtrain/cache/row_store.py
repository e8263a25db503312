"""All rows of a text in pinned host memory, and those of some layers in pages on the device as well.

Rows are written to both, so a layer leaves the device by giving its pages to the others: nothing is copied.
Source: SpeContext (arXiv 2512.00722) §6, Algorithm 2.

Shapes: L layers, B batch, G KV heads, S rows of a sequence, P pages, C pages of a layer, E numbers of a row
(K and V, 2 D), T new rows, M entries of a list.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from longtrain.cache.room import GIB, check_room
from longtrain.errors import ConfigError
from longtrain.kernels.row_moves import Pages, RowLists, move_rows

HOST_PROGRAMS = 2
"""Programs that read the host's memory for a KV head: with 8 heads 16, on as few of the GPU's cores."""


class RowStore:
    """See the module. Layers leave the device in the order in which `keep` lists them, the last one first.

    Args:
        shape: L, B, G, S, E.
        pages: P, pages of the device, each of them holding `page_rows` rows of one layer of all sequences.
        page_rows: rows of a page.
        keep: all layers, those that are kept on the device longest first.
        device: of the pages.
        dtype: of the rows.

    Raises:
        ConfigError: too little memory on either side, or the host has none that the device can read.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        *,
        pages: int,
        page_rows: int,
        keep: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        L, B, G, S, E = shape
        per_layer = -(-S // page_rows)
        needed = L * B * G * S * E * dtype.itemsize
        check_room(needed, "cpu", what="the host's copy of a KV cache", batch=B, tokens=S)
        self.host_LBGSE = torch.zeros(shape, dtype=dtype)
        if device.type == "cuda":
            _pin(self, self.host_LBGSE)
        self.pool_BGRE = torch.zeros(B, G, pages * page_rows, E, dtype=dtype, device=device)
        self.pages = Pages(torch.full((L, per_layer), -1, dtype=torch.int64, device=device), page_rows)
        self.on_host_L = torch.ones(L, dtype=torch.int64, device=device)
        """1 for layers whose chosen rows come from the host."""
        self.first_LG = torch.zeros(L, G, dtype=torch.int64, device=device)
        """List 0 for every head."""
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
        """Layers that are on the device, too."""
        return [layer for layer in self._keep if layer in self._held]

    @property
    def still(self) -> bool:
        """Whether no further page will be wanted: the tensors of steps are then the same to the end."""
        return self._ready == self._per_layer

    def most_resident(self, rows: int) -> int:
        """Layers that fit on the device with so many rows of each sequence."""
        return min(len(self._keep), self._n_pages // max(1, -(-rows // self.pages.size)))

    def make_room(self, rows: int) -> bool:
        """Let layers leave the device until the others have pages for `rows` rows; whether one left.

        Raises:
            ConfigError: more rows than there is room for on the host.
        """
        wanted, before = -(-rows // self.pages.size), len(self._held)
        if wanted <= self._ready:
            return False
        if wanted > self._per_layer:
            raise ConfigError(f"cache is full: {rows} rows, room for {self._per_layer * self.pages.size}")
        for layer in self.resident[self.most_resident(rows) :]:
            self._free += self._held.pop(layer)
            self.pages.at_LC[layer] = -1
        for layer, held in self._held.items():
            new = [self._free.pop() for _ in range(wanted - len(held))]
            self.pages.at_LC[layer, len(held) : wanted] = torch.tensor(new).to(self.pages.at_LC.device)
            held += new
        self._ready = wanted if self._held else self._per_layer
        away = [layer not in self._held for layer in range(len(self.on_host_L))]
        self.on_host_L.copy_(torch.tensor(away))
        return len(self._held) != before

    def write(self, layer: int, rows_BGTE: Tensor, to_BT: Tensor) -> None:
        """Write new rows of a layer."""
        T = rows_BGTE.shape[2]
        from_B1T = torch.arange(T, device=to_BT.device).expand(len(to_BT), 1, T)
        lists = RowLists(to_BT[:, None], from_B1T, self.first_LG[:1])
        move_rows(self.host_LBGSE[layer : layer + 1], rows_BGTE[None], lists)
        if layer in self._held:
            pages = Pages(self.pages.at_LC[layer : layer + 1], self.pages.size)
            move_rows(self.pool_BGRE[None], rows_BGTE[None], lists, goal_pages=pages)

    def write_all(self, source_LBGJE: Tensor, to_BP: Tensor, from_BP: Tensor, n_B: Tensor) -> None:
        """Write rows of all layers, the first `n_B` of each list."""
        lists = RowLists(to_BP[:, None], from_BP[:, None], self.first_LG, n_B[:, None])
        move_rows(self.host_LBGSE, source_LBGJE, lists)
        if self._held:
            pool = self.pool_BGRE.expand(len(self.host_LBGSE), *self.pool_BGRE.shape)
            move_rows(pool, source_LBGJE, lists, goal_pages=self.pages)

    def load(self, layer: int, goal_BGJE: Tensor, lists: RowLists, n_host_BX: Tensor) -> None:
        """Bring rows of a layer to the device, from wherever they are.

        Args:
            layer: which.
            goal_BGJE: written.
            lists: what goes where, with its counts.
            n_host_BX: the same counts where the layer is on the host, else 0.
        """
        goal = goal_BGJE[None]
        if layer in self._held or (self._held and not self.still):
            pages = Pages(self.pages.at_LC[layer : layer + 1], self.pages.size)
            move_rows(goal, self.pool_BGRE[None], lists, source_pages=pages)
        if layer not in self._held or not self.still:
            away = RowLists(lists.to_BXM, lists.from_BXM, lists.sets_LG, n_host_BX)
            move_rows(goal, self.host_LBGSE[layer : layer + 1], away, programs=HOST_PROGRAMS)

    def whole(self, layer: int, n_B: Tensor) -> Tensor:
        """The first `n_B` rows of a layer as rows_BGSE on the device, zeros behind them."""
        _, B, G, S, E = self.host_LBGSE.shape
        found = torch.zeros(B, G, S, E, dtype=self.host_LBGSE.dtype, device=n_B.device)
        at_B1S = torch.arange(S, device=n_B.device).expand(B, 1, S)
        lists = RowLists(at_B1S, at_B1S, self.first_LG[:1], n_B[:, None])
        self.load(layer, found, lists, n_B[:, None] * self.on_host_L[layer])
        return found

    def tensors(self) -> tuple[Tensor, ...]:
        """What steps read and write."""
        return self.host_LBGSE, self.pool_BGRE, self.pages.at_LC, self.on_host_L


def _pin(owner: RowStore, x: Tensor) -> None:
    """Let the device read and write a tensor of the host, as long as its owner is there.

    By registering it, since torch's allocator of pinned memory rounds up to a power of two.
    """
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(x.data_ptr(), x.nbytes, 0))
    if code:
        raise ConfigError(
            f"the host cannot pin {x.nbytes / GIB:.1f} GiB for the device to read (CUDA error {code}); "
            "shorten the prompts, lower decode.max_new_tokens or the batch, or leave cache=elastic out"
        )
    weakref.finalize(owner, cudart.cudaHostUnregister, x.data_ptr())
