"""A KV cache in host memory; device buffers have room for the selected entries of each KV head ("slots").

When the selection changes, only new entries are loaded, on a side stream while earlier layers are computed. A
layer waits for its own entries only. Committed entries are written to the host, so that slots can be reused.

Source: SpeContext (arXiv 2512.00722) §5 (elastic loading, prefetching) and §6 (adaptive memory).

Shapes: L layers, B batch, T new tokens, X sets, K entries of a set, J slots of a KV head, H query heads, G KV
heads, D head dim, E = 2 D numbers of an entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.cache.base import Causal, KernelMask, Mask, PrefixOnly
from longtrain.cache.entry_sets import ReadBudget
from longtrain.cache.host_store import WAITED, HostStore, beside
from longtrain.cache.room import GIB, check_room
from longtrain.cache.selected import LayerScores, SelectedCache, check_layers
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.entry_moves import EntryLists, move_entries
from longtrain.kernels.slot_assignment import SlotMap
from longtrain.kernels.tree_attention import tree_attention
from longtrain.settings import Count, Share, Words


@dataclass(frozen=True)
class Offloading:
    """Settings of `cache=elastic`.

    Args:
        memory_gib: device memory for whole layers. As sequences grow, layers leave the device, the last one
            first. None: every layer is on the host from the start.
        prefetch: load selected entries on a side stream (on CUDA); False: load them before the step.
        difference: load new entries only; False: load the whole set at every selection.
        reload_above: share of new entries above which a set is loaded whole.
        page_entries: entries of a page of device memory.
        side_by_side: number of neighbouring layers whose entries of a token are contiguous on the host, so
            that one launch loads them if they share their sets.
    """

    memory_gib: Annotated[float | None, Words("GiB above 0, or null")] = None
    prefetch: bool = True
    difference: bool = True
    reload_above: Share = 1.0
    page_entries: Count = 128
    side_by_side: Count = 2

    def __post_init__(self) -> None:
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise ConfigError(f"memory_gib={self.memory_gib}; allowed: GiB above 0, or null")


class ElasticCache(SelectedCache):
    """A KV cache in host memory. Until `begin` it reads prompts and writes them to the host layer by layer.

    Args:
        n_layers: L.
        n_kv_heads: G.
        head_dim: D.
        batch: B.
        max_tokens: most committed positions of a sequence.
        max_nodes: most tail entries of a step.
        device: device that computes attention.
        dtype: dtype of the entries.
        offloading: settings; None: the defaults.
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
        """Number of entries (K and V of one head) loaded from the host."""
        self.entry_sets = None
        self.slot_map: SlotMap | None = None
        self._budget: ReadBudget | None = None
        self._table_LG = self._ask = None
        self._masks, self._dense, self._high = KernelMask(), False, 0
        self._new: tuple[Tensor, Tensor] | None = None
        self._places: tuple[Tensor, EntryLists] | None = None
        self._waiting: dict[int, torch.cuda.Event] = {}

    def reserve(self, budget: ReadBudget, *, within_layers: bool = False) -> None:
        """Allocate memory for sets of this budget, once, before prompts are read.

        Raises:
            ConflictError: entries are selected within the layers, so they cannot be loaded before them.
            ConfigError: a layer does not exist, or `memory_gib` is too small for the selected entries.
        """
        if within_layers:
            raise ConflictError(
                "cache=elastic loads entries before the layers run, and these are selected within each "
                "layer; leave the cache out, or select by a head that scores before the forward"
            )
        if budget == self._budget:
            return
        L, B, G, S, E = self._shape
        check_layers(budget, L)
        near = budget.every - 1 + max(self._nodes, budget.every)
        item = self._dtype.itemsize
        slots = L * B * G * (budget.rows + near) * E * item
        page = B * G * self.offloading.page_entries * E * item
        per_layer = -(-S // self.offloading.page_entries)
        whole = sorted(set(budget.dense_layers))
        least = len(whole) * per_layer
        cap = self.offloading.memory_gib
        pages = least if cap is None else min(int(cap * GIB - slots) // page, L * per_layer)
        if pages < least:
            needed = (slots + least * page) / GIB
            raise ConfigError(
                f"memory_gib={cap} and the entries that each step reads take {needed:.3g} GiB ({budget.rows} "
                f"in each of {L} layers, {len(whole)} of them read whole); allowed: "
                f"{1.005 * needed:.3g} or more"  # rounded, and never down
            )
        check_room(slots + pages * page, self._device, what="an elastic cache", batch=B, tokens=S)
        others = [layer for layer in range(L) if layer not in whole]
        self._rows = HostStore(
            self._shape,
            pages=pages,
            page_entries=self.offloading.page_entries,
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
        """See `SelectedCache`; raises as `reserve` does, too."""
        self.reserve(budget, within_layers=table_LG is None or ask is not None)
        super().begin(budget, table_LG=table_LG)
        assert self.entry_sets is not None and self._table_LG is not None
        L, B, G, _, _ = self._shape
        K, X = budget.rows, self.entry_sets.idx_BXK.shape[1]
        most = int(self.offloading.reload_above * K) if self.offloading.difference else -1
        self.slot_map = SlotMap(B, X, K, most_moved=most, device=self._device)
        self._heads_LX = torch.nn.functional.one_hot(self._table_LG, X).sum(1)
        self._heads_LX[list(budget.dense_layers)] = 0
        self._rows.share(self._table_LG, budget.dense_layers)
        self._counts_LBX = torch.zeros(L, B, X, dtype=torch.int64, device=self._device)
        self.moved_rows.zero_()
        some = len(set(budget.dense_layers)) < L  # else no layer would wait for the side stream
        cuda = self._device.type == "cuda" and self.offloading.prefetch and some
        self._side = torch.cuda.Stream(self._device, priority=-1) if cuda else None
        self._beside = beside(B * G * K)

    def _sizes(self) -> tuple[int, int, int]:
        return self._shape[:3]

    def choose(self, scores_BXS: Tensor | None) -> None:
        """See `SelectedCache`; starts loading the entries that are not in slots yet."""
        assert self._budget is not None
        self._make_room(self._nodes)
        super().choose(scores_BXS)
        self._places = None
        sets, slots = self.entry_sets, self.slot_map
        assert sets is not None and slots is not None
        self._wait(*self._waiting)  # loads of a dense step may still use the lists below
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
        """Count the entries of each set to load from the host, for each layer."""
        assert self.slot_map is not None
        torch.mul(self._rows.on_host_L[:, None, None], self.slot_map.n_BX, out=self._counts_LBX)
        self.moved_rows.add_((self._counts_LBX * self._heads_LX[:, None]).sum())

    def load(self, *, marked: bool = False) -> None:
        """Load the entries that the last selection is missing; `marked`: on the side stream, with events."""
        slots, table_LG = self.slot_map, self._table_LG
        assert slots is not None and table_LG is not None
        programs = self._beside if marked else WAITED
        for own in self._rows.runs:
            lists = EntryLists(slots.to_BXK, slots.from_BXK, table_LG[own], slots.n_BX[None])
            self._rows.load(own, self._slots_LBGJE[own], lists, self._counts_LBX[own], programs=programs)
            if marked:
                there = torch.cuda.current_stream(self._device).record_event()
                self._waiting.update(dict.fromkeys(range(own.start, own.stop), there))

    def _wait(self, *layers: int) -> None:
        """Make the current stream wait for the entries of these layers."""
        for layer in layers:
            if event := self._waiting.pop(layer, None):
                torch.cuda.current_stream(self._device).wait_event(event)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `KVCache`: writes to the slots in a sparse step, else to the store of all entries.

        Raises:
            ConfigError: there is no selector, or the new entries do not fit.
        """
        if self._budget is None:
            raise ConfigError(
                "cache=elastic stores entries on the host for a selector, and there is none; add one "
                "(an artifact of specontext), or leave the cache out"
            )
        T = k_BGTD.shape[2]
        rows_BGTE = torch.cat((k_BGTD, v_BGTD), -1)
        self._tail = T
        sparse = self.entry_sets is not None and not self._dense
        if not sparse or layer in self._budget.dense_layers:
            self._make_room(T)
            self._new = (k_BGTD, v_BGTD)
            self._rows.write(layer, rows_BGTE, self._after(self.len_B, T))
        if sparse:
            _, lists = self._new_places(T)
            move_entries(self._slots_LBGJE[layer : layer + 1], rows_BGTE[None], lists)

    def tail_slots(self, layer: int, rows: int) -> None:
        """See `KVCache`: entries must be stored with `write`."""

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `SelectedCache`."""
        new, self._new = self._new, None
        sparse = self.entry_sets is not None and not self._dense and not isinstance(mask, PrefixOnly)
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
        """K and V of the slots, [B, G, J, D]: selected entries, those committed since, and new ones."""
        k_BGJD, v_BGJD = self._slots_LBGJE[layer].chunk(2, -1)
        return k_BGJD, v_BGJD

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`; writes accepted entries to the host."""
        if self.entry_sets is None:
            assert path_BP is None, "nothing is drafted before entries are selected"
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
        """Move the entries of an accepted path to the front of the new ones; the others are undefined."""
        slots, first_LG = self._slots_LBGJE, self._rows.first_LG
        at_B1P = torch.arange(from_BP.shape[1], device=from_BP.device).expand(len(from_BP), 1, -1)
        between = slots.new_empty(*slots.shape[:3], from_BP.shape[1], slots.shape[4])
        move_entries(between, slots, EntryLists(at_B1P, from_BP[:, None], first_LG))
        move_entries(slots, between, EntryLists(to_BP[:, None], at_B1P, first_LG))

    def make_room(self, rows: int) -> bool:
        """Ensure room for `rows` entries of each sequence. Returns True if a layer was offloaded."""
        return self._rows.make_room(rows)

    def foresee(self, rows: int) -> None:
        """See `KVCache`: layers are offloaded between recorded cycles, not within them."""
        self._make_room(self._nodes)
        self._high += rows

    def _make_room(self, tail: int) -> None:
        """Ensure room before a step; reads exact lengths only if the host's bound would offload a layer."""
        rows = self._high + tail
        if rows > self.capacity or self._rows.most_resident(rows) < len(self._rows.resident):
            self._high = int(self.len_B.max()) if self._high else 0
            rows = self._high + tail
        if rows > self.capacity:
            raise ConfigError(
                f"cache is full: {self._high} tokens committed and {tail} new tokens, room for "
                f"{self.capacity}; raise the engine's limits (tokens, nodes) or shorten the prompt"
            )
        self._rows.make_room(rows)

    def _near(self) -> Tensor:
        """Slot of the first new entry: after the selected ones and those committed since."""
        assert self.entry_sets is not None
        return self.entry_sets.n_B + self.len_B - self.entry_sets.since_B

    def _new_places(self, T: int) -> tuple[Tensor, EntryLists]:
        """`_near`, and index pairs that move T new entries there; computed once per step for all layers."""
        if self._places is None or self._places[1].to_BXM.shape[-1] != T:
            near_B = self._near()
            from_B1T = torch.arange(T, device=self._device).expand(len(near_B), 1, T)
            lists = EntryLists(self._after(near_B, T)[:, None], from_B1T, self._rows.first_LG[:1])
            self._places = near_B, lists
        return self._places

    def _after(self, first_B: Tensor, count: int) -> Tensor:
        """Index ranges [B, count]: `count` successive numbers from each element of `first_B`."""
        return first_B[:, None] + torch.arange(count, device=self._device)

    @property
    def used(self) -> int:
        """The whole capacity: with CUDA graphs the host does not know a smaller bound."""
        return self.capacity

    @property
    def offloaded(self) -> list[int]:
        """Layers that are in host memory only."""
        resident = set(self._rows.resident)
        return [layer for layer in range(self._shape[0]) if layer not in resident]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of a head, K and V."""
        return self._shape[4] * self._dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Bytes of all entries on the host."""
        return self._rows.host_NBGSPE.nbytes

    @property
    def moved_bytes(self) -> int:
        """Bytes loaded from the host; synchronises with the device."""
        return int(self.moved_rows) * self.row_bytes

    def keys(self, layer: int) -> Tensor:
        """A layer's keys as k_BGSD, copied to the device for this call."""
        k_BGSD, _ = self._rows.whole(layer, self.len_B).chunk(2, -1)
        return k_BGSD

    def expect(self, n_B: Tensor | None) -> None:
        """See `KVCache`."""

    def room_left(self) -> int:
        """See `KVCache`."""
        return self.capacity - self._high

    def bytes(self) -> int:
        """Bytes on the device, and of the entries on the host."""
        sets = [one.bytes() for one in (self.entry_sets, self.slot_map) if one is not None]
        return sum(tensor.nbytes for tensor in (*self._rows.tensors(), self._slots_LBGJE)) + sum(sets)

    def free(self) -> None:
        """See `KVCache`; host memory is freed with the last reference."""
        for tensor in (self._slots_LBGJE, self._rows.pool_BGRE):
            tensor.untyped_storage().resize_(0)

    def tensors(self) -> tuple[Tensor, ...] | None:
        """See `KVCache`; None before `reserve`."""
        if self._budget is None:
            return None
        own = (self.len_B, self._slots_LBGJE, self.moved_rows, *self._rows.tensors())
        if self.entry_sets is None or self.slot_map is None:
            return own
        return (*own, self._counts_LBX, *self.entry_sets.tensors(), *self.slot_map.tensors())
