"""A cache that stores every entry and reads only the selected ones in decoding.

Shapes: L layers, B batch, T new tokens, S cache positions, X sets, H query heads, G KV heads, D head dim, J
entries read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.arena import ArenaCache
from longtrain.cache.base import KernelMask, KVCache, Mask, PrefixOnly
from longtrain.cache.dense import DenseCache
from longtrain.cache.entry_sets import EntrySets, ReadBudget
from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import runs_on
from longtrain.kernels.entry_moves import EntryLists, move_entries
from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.tree_attention import tree_attention

LayerScores: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_BHTD of the step's tokens, root first, k_BGSD of all positions, len_B) -> scores_BGS."""


class _SharedByLayers(NamedTuple):
    """Tensors that all layers of a step share.

    Args:
        new_rows: T.
        count_B: entries before the new ones.
        at_J: 0 .. J - 1.
        rows_BXJ: positions of the entries of all sets; None if each layer selects its own.
    """

    new_rows: int
    count_B: Tensor
    at_J: Tensor
    rows_BXJ: Tensor | None


class SelectedCache(KVCache):
    """Reads everything until `begin`, then in each step the sets selected at its start (`entry_sets`).

    Entries are never dropped, so those of generated tokens can be selected like those of the prompt. A draft
    with cross-attention (`PrefixOnly`) reads the whole prefix. If every sequence fits the budget, steps equal
    those of `store` bit for bit.

    Args:
        store: cache of all entries, with `base` 0. Over an arena a step is the same operations for every
            length, and its state is updated in place (`tensors`).
    """

    def __init__(self, store: DenseCache | ArenaCache) -> None:
        self.store = store
        self.held = store.store if isinstance(store, ArenaCache) else store
        """The dense cache with the entries."""
        self.len_B = store.len_B
        self.entry_sets: EntrySets | None = None
        self._table_LG: Tensor | None = None
        self._ask: LayerScores | None = None
        self._masks = KernelMask()
        self._dense = False
        self._step: _SharedByLayers | None = None

    def begin(self, budget: ReadBudget, *, table_LG: Tensor | None, ask: LayerScores | None = None) -> None:
        """Start sparse decoding.

        Args:
            budget: number of entries to read.
            table_LG: index of the set that each KV head of each layer reads, int64; None: each has its own,
                scored by `ask`.
            ask: scores entries within every layer of a step whose sets were not selected before it.

        Raises:
            ConfigError: a table of another shape, or a layer that does not exist.
        """
        L, B, G = self._sizes()
        if table_LG is None:
            table_LG = torch.arange(L * G).view(L, G)
        if table_LG.shape != (L, G) or int(table_LG.min()) < 0:
            raise refusal(
                ConfigError,
                f"a table of sets {list(table_LG.shape)} with numbers from {int(table_LG.min())}",
                f"{[L, G]} (layers, KV heads), numbers from 0",
            )
        check_layers(budget, L)
        device, n_sets = self.len_B.device, 1 + int(table_LG.max())
        if self._table_LG is None or not torch.equal(self._table_LG, table_LG.to(device)):
            self._table_LG = table_LG.to(device)
        self._ask, self._step = ask, None
        known = self.entry_sets
        if known is not None and (known.budget, *known.idx_BXK.shape[:2]) == (budget, B, n_sets):
            known.forget()  # a graph of a step may have the addresses of its tensors
        else:
            self.entry_sets = EntrySets(budget, B, n_sets, device)

    def reserve(self, budget: ReadBudget, *, within_layers: bool = False) -> None:
        """Called before prompts are read with the budget; `within_layers`: each layer selects as it runs."""

    def _sizes(self) -> tuple[int, int, int]:
        """Numbers of layers, sequences and KV heads."""
        L, B, G, _, _ = self.held.k_LBGSD.shape
        return L, B, G

    def choose(self, scores_BXS: Tensor | None) -> None:
        """Select the entries that the coming step reads, in the sequences where it is due.

        Args:
            scores_BXS: scores of every set (see `choose_entries`), of `used` positions or more; None: each
                layer calls `ask`.

        Raises:
            ConfigError: scores of fewer positions, or of another number of sets.
        """
        assert self.entry_sets is not None, "begin() comes first"
        self._step = None
        self.entry_sets.open(self.len_B)
        if scores_BXS is None:
            return
        if scores_BXS.shape[-1] < self.used:
            scored = scores_BXS.shape[-1]
            raise refusal(ConfigError, f"scores of {scored} entries", f"all {self.used} in the cache")
        self.entry_sets.put(scores_BXS)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Context manager within which steps read everything."""
        before, self._dense = self._dense, True
        try:
            yield
        finally:
            self._dense = before

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `DenseCache`."""
        self.store.write(layer, k_BGTD, v_BGTD)

    def tail_slots(self, layer: int, rows: int) -> Slots | None:
        """See `KVCache`."""
        return self.store.tail_slots(layer, rows)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention over the selected entries, those committed since, and the new tokens."""
        found = self._chosen_attention(layer, q_BHTD, mask, scale)
        return self.store.attend(layer, q_BHTD, mask=mask, scale=scale) if found is None else found

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`, and `attend_window`."""
        found = None if window else self._chosen_attention(layer, q_BHTD, mask, scale)
        if found is not None:
            return found
        return self.store.attend_lse(layer, q_BHTD, mask=mask, scale=scale, window=window)

    def _chosen_attention(
        self, layer: int, q_BHTD: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """Attention of a step over selected entries; None: all are read."""
        sets, G = self.entry_sets, self.held.k_LBGSD.shape[2]
        if sets is None or self._dense or isinstance(mask, PrefixOnly):
            return None
        if self._ask is not None:
            scores_BGS = self._ask(layer, q_BHTD, self.keys(layer), self.len_B)
            sets.put(scores_BGS, slice(layer * G, (layer + 1) * G))
        if layer in sets.budget.dense_layers or self._fits:
            return None
        k_BGJD, v_BGJD = self.chosen(layer, q_BHTD.shape[2])
        count_B = self._step_of(q_BHTD.shape[2]).count_B
        return tree_attention(q_BHTD, k_BGJD, v_BGJD, count_B, self._masks.of(mask), scale=scale)

    def attend_window(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`: a layer with a window reads all of it, and its sets are not used."""
        return self.store.attend_window(layer, q_BHTD, mask=mask, scale=scale, window=window)

    @property
    def used(self) -> int:
        """Upper bound of the committed positions, known on the host: an arena's whole capacity."""
        return self.store.slots if isinstance(self.store, ArenaCache) else self.store.used

    @property
    def _fits(self) -> bool:
        """True if the host knows that every sequence fits the budget (in an arena: to its end)."""
        assert self.entry_sets is not None
        most = self.store.claimed if isinstance(self.store, ArenaCache) else self.store.used
        return most <= self.entry_sets.budget.rows

    def keys(self, layer: int) -> Tensor:
        """A layer's keys as k_BGSD at the `used` positions; undefined from `len_B` on."""
        return self.held.k_LBGSD[layer, :, :, : self.used]

    def chosen(self, layer: int, new_rows: int) -> tuple[Tensor, Tensor]:
        """K and V of the entries that a step reads, each [B, G, J, D] (`EntrySets.rows`)."""
        rows_BXJ, sets_G = self._rows_of(layer, new_rows)
        buffers = (self.held.k_LBGSD, self.held.v_LBGSD)
        if not runs_on(self.len_B.device):
            index = rows_BXJ[:, sets_G, :, None].expand(-1, -1, -1, buffers[0].shape[-1])
            return buffers[0][layer].gather(2, index), buffers[1][layer].gather(2, index)
        (B, X, J), (_, _, G, _, D) = rows_BXJ.shape, buffers[0].shape
        at_BXJ = self._step_of(new_rows).at_J.expand(B, X, J)
        lists = EntryLists(at_BXJ, rows_BXJ, sets_G[None])
        goals = buffers[0].new_empty(2, 1, B, G, J, D)
        for goal, buffer in zip(goals, buffers, strict=True):
            move_entries(goal, buffer[layer : layer + 1], lists)
        return goals[0, 0], goals[1, 0]

    def _rows_of(self, layer: int, new_rows: int) -> tuple[Tensor, Tensor]:
        """Positions of some sets' entries, rows_BXJ, and the index of the set of each KV head of a layer."""
        sets, table_LG, step = self.entry_sets, self._table_LG, self._step_of(new_rows)
        assert sets is not None and table_LG is not None
        if step.rows_BXJ is not None:
            return step.rows_BXJ, table_LG[layer]
        G = table_LG.shape[1]  # the layer has its own sets, selected in it
        return sets.rows(slice(layer * G, (layer + 1) * G), self.held.capacity, new_rows), table_LG[0]

    def _step_of(self, new_rows: int) -> _SharedByLayers:
        """The tensors that all layers share, computed by the first one."""
        sets = self.entry_sets
        assert sets is not None
        if self._step is None or self._step.new_rows != new_rows:
            rows_BXJ = None
            if self._ask is None:
                rows_BXJ = sets.rows(slice(None), self.held.capacity, new_rows)
            count_B = sets.n_B + self.len_B - sets.since_B
            at_J = torch.arange(sets.read(new_rows), device=self.len_B.device)
            self._step = _SharedByLayers(new_rows, count_B, at_J, rows_BXJ)
        return self._step

    def expect(self, n_B: Tensor | None) -> None:
        """See `KVCache`."""
        self.store.expect(n_B)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """See `KVCache`."""
        self.store.commit(path_BP, n_B)
        self.len_B, self._step = self.store.len_B, None
        self._masks.forget()

    def commit_limit(self) -> Tensor | None:
        """See `KVCache`: up to the position at which plain decoding would select again."""
        return None if self.entry_sets is None else self.entry_sets.limit(self.len_B)

    def room_left(self) -> int:
        """See `KVCache`."""
        return self.store.room_left()

    def bytes(self) -> int:
        """Bytes of all entries, and of the sets."""
        return self.store.bytes() + (0 if self.entry_sets is None else self.entry_sets.bytes())

    def tensors(self) -> tuple[Tensor, ...] | None:
        """See `KVCache`; None over a cache that is not an arena."""
        own = self.store.tensors()
        if own is None or self.entry_sets is None or self._table_LG is None or self._fits:
            return own
        return (*own, self._table_LG, *self.entry_sets.tensors())


def check_layers(budget: ReadBudget, n_layers: int) -> None:
    """Refuse a budget with a layer that does not exist."""
    if any(layer >= n_layers for layer in budget.dense_layers):
        raise refusal(ConfigError, f"select.dense_layers={list(budget.dense_layers)}", f"0..{n_layers - 1}")
