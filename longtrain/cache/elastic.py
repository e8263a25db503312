"""A cache whose rows lie in host memory and whose chosen rows stand in slots on the device.

When other rows are chosen, the difference alone is moved, on a side stream while earlier layers are computed.
A layer waits for its own rows only. New rows are written to the host as they are committed, so that none need
ever stay on the device.
Source: SpeContext (arXiv 2512.00722) §5 (elastic loading, prefetching) and §6 (adaptive memory).

Shapes: L layers, B batch, T new rows, X sets, K rows of a set, J slots of a KV head, H query heads, G KV
heads, D head dim, E = 2 D numbers of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.cache.base import Causal, KernelMask, Mask, PrefixOnly
from longtrain.cache.room import GIB, check_room
from longtrain.cache.row_sets import ReadBudget
from longtrain.cache.row_store import WAITED, RowStore, beside
from longtrain.cache.selected import LayerScores, SelectedCache, check_layers
from longtrain.cache.slots import SlotMap
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.row_moves import RowLists, move_rows
from longtrain.kernels.tree_attention import tree_attention
from longtrain.settings import Count, Share, Words


@dataclass(frozen=True)
class Offloading:
    """What of the cache lies where, and how it gets there.

    Args:
        memory_gib: what rows may take on the device. As texts grow, the last layers leave it one by one.
            None: every layer is on the host from the start.
        prefetch: chosen rows come on a side stream (on CUDA), or all of them before the step.
        difference: rows that are chosen again stay where they are; False: all are moved at every choice.
        reload_above: share of a set from which on, where so many of its rows are new, all are loaded.
        page_rows: rows of a page of the device's memory.
        side_by_side: neighbouring layers whose rows of a token lie together on the host, to be brought by one
            launch where they share their sets.
    """

    memory_gib: Annotated[float | None, Words("GiB above 0, or null")] = None
    prefetch: bool = True
    difference: bool = True
    reload_above: Share = 1.0
    page_rows: Count = 128
    side_by_side: Count = 2

    def __post_init__(self) -> None:
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise ConfigError(f"memory_gib={self.memory_gib}; allowed: GiB above 0, or null")


class ElasticCache(SelectedCache):
    """See the module. Until `begin` it reads prompts, which it hands to the host layer by layer.

    Args:
        n_layers: L.
        n_kv_heads: G.
        head_dim: D.
        batch: B.
        max_tokens: most committed positions of a sequence.
        max_nodes: most tail rows of a step.
        device: where attention is computed.
        dtype: of the rows.
        offloading: see `Offloading`.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        batch: int,
        max_tokens: int,
        max_nodes: int,
        device: torch.device | str,
        dtype: torch.dtype,
        offloading: Offloading | None = None,
    ) -> None:
        self.offloading = offloading or Offloading()
        self.capacity = max_tokens + max_nodes
        self._shape = (n_layers, batch, n_kv_heads, self.capacity, 2 * head_dim)
        self._device, self._dtype, self._nodes = torch.device(device), dtype, max(1, max_nodes)
        self.len_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.moved_rows = torch.zeros((), dtype=torch.int64, device=device)
        """Rows, each K and V of one head, that choices brought from the host."""
        self.row_sets = None
        self.slot_map: SlotMap | None = None
        self._budget: ReadBudget | None = None
        self._table_LG = self._ask = None
        self._masks, self._dense, self._high = KernelMask(), False, 0
        self._new: tuple[Tensor, Tensor] | None = None
        self._places: tuple[Tensor, RowLists] | None = None
        self._waiting: dict[int, torch.cuda.Event] = {}

    def reserve(self, budget: ReadBudget, *, within_layers: bool = False) -> None:
        """Take the memory for sets of this budget, once: before prompts are read.

        Raises:
            ConflictError: rows that are chosen within the layers cannot be brought before them.
            ConfigError: a layer that there is not, the cap leaves no room for the chosen rows, or this cache
                was made for another budget.
        """
        if within_layers:
            raise ConflictError(
                "cache=elastic brings rows before the layers run, and these are chosen within each layer; "
                "leave the cache out, or choose by a head that scores before the forward"
            )
        if budget == self._budget:
            return
        if self._budget is not None:
            raise ConfigError(f"cache=elastic was made for {self._budget} and is to read {budget}")
        L, B, G, S, E = self._shape
        check_layers(budget, L)
        near = budget.every - 1 + max(self._nodes, budget.every)
        item = self._dtype.itemsize
        slots = L * B * G * (budget.rows + near) * E * item
        page = B * G * self.offloading.page_rows * E * item
        per_layer = -(-S // self.offloading.page_rows)
        whole = sorted(set(budget.dense_layers))
        least = len(whole) * per_layer
        cap = self.offloading.memory_gib
        pages = least if cap is None else min(int(cap * GIB - slots) // page, L * per_layer)
        if pages < least:
            needed = (slots + least * page) / GIB
            raise ConfigError(
                f"memory_gib={cap} and the rows that each step reads take {needed:.3g} GiB ({budget.rows} in "
                f"each of {L} layers, {len(whole)} of them read whole); allowed: "
                f"{1.005 * needed:.3g} or more"  # rounded, and never down
            )
        check_room(slots + pages * page, self._device, what="an elastic cache", batch=B, tokens=S)
        others = [layer for layer in range(L) if layer not in whole]
        self._rows = RowStore(
            self._shape,
            pages=pages,
            page_rows=self.offloading.page_rows,
            keep=[*whole, *others],
            side_by_side=self.offloading.side_by_side,
            device=self._device,
            dtype=self._dtype,
        )
        self._slots_LBGJE = torch.zeros(
            L, B, G, budget.rows + near, E, dtype=self._dtype, device=self._device
        )
        self._budget = budget

    def begin(self, budget: ReadBudget, *, table_LG: Tensor | None, ask: LayerScores | None = None) -> None:
        """See `SelectedCache`.

        Raises:
            ConfigError: see `reserve`.
        """
        self.reserve(budget, within_layers=table_LG is None or ask is not None)
        super().begin(budget, table_LG=table_LG)
        assert self.row_sets is not None and self._table_LG is not None
        L, B, G, _, _ = self._shape
        K, X = budget.rows, self.row_sets.idx_BXK.shape[1]
        most = int(self.offloading.reload_above * K) if self.offloading.difference else -1
        self.slot_map = SlotMap(B, X, K, most_moved=most, device=self._device)
        self._heads_LX = torch.nn.functional.one_hot(self._table_LG, X).sum(1)
        self._heads_LX[list(budget.dense_layers)] = 0
        self._rows.share(self._table_LG, budget.dense_layers)
        self._counts_LBX = torch.zeros(L, B, X, dtype=torch.int64, device=self._device)
        self.moved_rows.zero_()
        some = len(set(budget.dense_layers)) < L  # or no layer would wait for what is brought beside a step
        cuda = self._device.type == "cuda" and self.offloading.prefetch and some
        self._side = torch.cuda.Stream(self._device, priority=-1) if cuda else None
        self._beside = beside(B * G * K)

    def _sizes(self) -> tuple[int, int, int]:
        return self._shape[:3]

    def choose(self, scores_BXS: Tensor | None) -> None:
        """See `SelectedCache`; what is missing in the slots is asked for."""
        assert self._budget is not None
        self._make_room(self._nodes)
        super().choose(scores_BXS)
        self._places = None
        sets, slots = self.row_sets, self.slot_map
        assert sets is not None and slots is not None
        self._wait(*self._waiting)  # of a step that read all rows: the lists below are still in use
        slots.change(sets.idx_BXK, sets.n_B, sets.due_B)
        if self._side is None:
            self._count()
            self.load()
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._count()
            self.load(marked=True)

    def _count(self) -> None:
        """How many rows of each set the host is asked for, layer by layer."""
        assert self.slot_map is not None
        torch.mul(self._rows.on_host_L[:, None, None], self.slot_map.n_BX, out=self._counts_LBX)
        self.moved_rows.add_((self._counts_LBX * self._heads_LX[:, None]).sum())

    def load(self, *, marked: bool = False) -> None:
        """Bring the rows that the last choice lacked; `marked`: beside a step, with events."""
        slots, table_LG = self.slot_map, self._table_LG
        assert slots is not None and table_LG is not None
        programs = self._beside if marked else WAITED
        for own in self._rows.runs:
            lists = RowLists(slots.to_BXK, slots.from_BXK, table_LG[own], slots.n_BX[None])
            self._rows.load(own, self._slots_LBGJE[own], lists, self._counts_LBX[own], programs=programs)
            if marked:
                there = torch.cuda.current_stream(self._device).record_event()
                self._waiting.update(dict.fromkeys(range(own.start, own.stop), there))

    def _wait(self, *layers: int) -> None:
        """These layers' rows are there when what is launched from here on runs."""
        for layer in layers:
            if event := self._waiting.pop(layer, None):
                torch.cuda.current_stream(self._device).wait_event(event)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `KVCache`: to the slots in a sparse step, else to where all rows are.

        Raises:
            ConfigError: nothing chooses rows, or the new ones do not fit.
        """
        if self._budget is None:
            raise ConfigError(
                "cache=elastic keeps rows on the host for something that chooses among them, and nothing "
                "does; add what selects (an artifact of specontext), or leave the cache out"
            )
        T = k_BGTD.shape[2]
        rows_BGTE = torch.cat((k_BGTD, v_BGTD), -1)
        self._tail = T
        sparse = self.row_sets is not None and not self._dense
        if not sparse or layer in self._budget.dense_layers:
            self._make_room(T)
            self._new = (k_BGTD, v_BGTD)
            self._rows.write(layer, rows_BGTE, self._after(self.len_B, T))
        if sparse:
            spare = self._slots_LBGJE.shape[3] - self._budget.rows - self._budget.every + 1
            if spare < T:
                raise ConfigError(f"a step of {T} rows; this cache was made for {spare} or fewer")
            _, lists = self._new_places(T)
            move_rows(self._slots_LBGJE[layer : layer + 1], rows_BGTE[None], lists)

    def tail_slots(self, layer: int, rows: int) -> None:
        """See `KVCache`: rows go through `write`."""

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `SelectedCache`."""
        new, self._new = self._new, None
        sparse = self.row_sets is not None and not self._dense and not isinstance(mask, PrefixOnly)
        if sparse and self._budget is not None and layer not in self._budget.dense_layers:
            self._wait(layer)
            k_BGJD, v_BGJD = self.chosen(layer, q_BHTD.shape[2])
            near_B, _ = self._new_places(q_BHTD.shape[2])
            return tree_attention(q_BHTD, k_BGJD, v_BGJD, near_B, self._masks.of(mask), scale=scale)
        if self._high == 0 and new is not None and isinstance(mask, Causal):
            return scaled_dot_product_attention(
                q_BHTD, *new, is_causal=True, scale=scale, enable_gqa=True
            ), None
        tail = 0 if isinstance(mask, PrefixOnly) else q_BHTD.shape[2]
        k_BGSD, v_BGSD = self._rows.whole(layer, self.len_B + tail).chunk(2, -1)
        return tree_attention(q_BHTD, k_BGSD, v_BGSD, self.len_B, self._masks.of(mask), scale=scale)

    def chosen(self, layer: int, new_rows: int) -> tuple[Tensor, Tensor]:
        """K and V of the slots, each [B, G, J, D]: rows chosen, those committed since, and the new ones."""
        k_BGJD, v_BGJD = self._slots_LBGJE[layer].chunk(2, -1)
        return k_BGJD, v_BGJD

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`; accepted rows are written to the host."""
        if self.row_sets is None:
            assert path_BP is None, "nothing is drafted before rows are chosen"
            self._high += self._tail
        else:
            near_B, P = self._near(), self._tail if path_BP is None else path_BP.shape[1]
            at_BP = self._after(near_B, P)
            from_BP = at_BP if path_BP is None else near_B[:, None] + path_BP
            self._rows.write_all(self._slots_LBGJE, self._after(self.len_B, P), from_BP, n_B)
            if path_BP is not None:
                self._compact(from_BP, at_BP)
            self._high += P
        self.len_B.add_(n_B)
        self._places = None
        self._masks.forget()

    def _compact(self, from_BP: Tensor, to_BP: Tensor) -> None:
        """Bring the rows of a path to the front of the new ones; what they leave behind means nothing."""
        slots, first_LG = self._slots_LBGJE, self._rows.first_LG
        at_B1P = torch.arange(from_BP.shape[1], device=from_BP.device).expand(len(from_BP), 1, -1)
        between = slots.new_empty(*slots.shape[:3], from_BP.shape[1], slots.shape[4])
        move_rows(between, slots, RowLists(at_B1P, from_BP[:, None], first_LG))
        move_rows(slots, between, RowLists(to_BP[:, None], at_B1P, first_LG))

    def make_room(self, rows: int) -> bool:
        """Have `rows` rows of each sequence fit; whether a layer left the device."""
        return self._rows.make_room(rows)

    def foresee(self, rows: int) -> None:
        """See `KVCache`: layers leave the device between recorded cycles, not within them."""
        self._make_room(self._nodes)
        self._high += rows

    def _make_room(self, tail: int) -> None:
        """Before a step: exact lengths are asked for only where the host's bound says that a layer must go.

        Raises:
            ConfigError: the rows do not fit.
        """
        rows = self._high + tail
        if rows > self.capacity or self._rows.most_resident(rows) < len(self._rows.resident):
            self._high = int(self.len_B.max()) if self._high else 0
            rows = self._high + tail
        if rows > self.capacity:
            raise ConfigError(
                f"cache is full: {self._high} tokens committed and {tail} new rows, room for "
                f"{self.capacity}; raise the engine's limits (tokens, nodes) or shorten the prompt"
            )
        self._rows.make_room(rows)

    def _near(self) -> Tensor:
        """Slot of the first new row: behind the chosen ones and those committed since."""
        assert self.row_sets is not None
        return self.row_sets.n_B + self.len_B - self.row_sets.since_B

    def _new_places(self, T: int) -> tuple[Tensor, RowLists]:
        """`_near`, and lists that bring so many new rows there; made once a step for all layers."""
        if self._places is None or self._places[1].to_BXM.shape[-1] != T:
            near_B = self._near()
            from_B1T = torch.arange(T, device=self._device).expand(len(near_B), 1, T)
            lists = RowLists(self._after(near_B, T)[:, None], from_B1T, self._rows.first_LG[:1])
            self._places = near_B, lists
        return self._places

    def _after(self, first_B: Tensor, count: int) -> Tensor:
        """So many numbers from each on."""
        return first_B[:, None] + torch.arange(count, device=self._device)

    @property
    def used(self) -> int:
        """All slots: steps that are captured cannot know better."""
        return self.capacity

    @property
    def offloaded(self) -> list[int]:
        """Layers that are on the host alone."""
        resident = set(self._rows.resident)
        return [layer for layer in range(self._shape[0]) if layer not in resident]

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one row of a head."""
        return self._shape[4] * self._dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Bytes of all rows on the host."""
        return self._rows.host_NBGSPE.nbytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that choices brought from the host; waits for the device."""
        return int(self.moved_rows) * self.row_bytes

    def keys(self, layer: int) -> Tensor:
        """A layer's keys as k_BGSD, brought to the device for this call."""
        k_BGSD, _ = self._rows.whole(layer, self.len_B).chunk(2, -1)
        return k_BGSD

    def expect(self, n_B: Tensor | None) -> None:
        """See `KVCache`."""

    def rows_left(self) -> int:
        """See `KVCache`."""
        return self.capacity - self._high

    def bytes(self) -> int:
        """Bytes on the device and of the rows on the host."""
        sets = [one.bytes() for one in (self.row_sets, self.slot_map) if one is not None]
        return sum(tensor.nbytes for tensor in (*self._rows.tensors(), self._slots_LBGJE)) + sum(sets)

    def free(self) -> None:
        """See `KVCache`; the host's rows go with the last who knows them."""
        for tensor in (self._slots_LBGJE, self._rows.pool_BGRE):
            tensor.untyped_storage().resize_(0)

    def tensors(self) -> tuple[Tensor, ...] | None:
        """See `KVCache`; None before it is known how many rows are read."""
        if self._budget is None:
            return None
        own = (self.len_B, self._slots_LBGJE, self.moved_rows, *self._rows.tensors())
        if self.row_sets is None or self.slot_map is None:
            return own
        return (*own, self._counts_LBX, *self.row_sets.tensors(), *self.slot_map.tensors())
