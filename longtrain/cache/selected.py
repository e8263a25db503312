"""A cache that holds every row and reads, while decoding, those that were chosen.

Shapes: L layers, B batch, T new rows, S slots, X sets, H query heads, G KV heads, D head dim, J rows read.
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
from longtrain.cache.row_sets import ReadBudget, RowSets
from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import runs_on
from longtrain.kernels.fused_layer import Slots
from longtrain.kernels.row_moves import RowLists, move_rows
from longtrain.kernels.tree_attention import tree_attention

LayerScores: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_BHTD of the step's rows, root first, k_BGSD of all slots, len_B) -> scores_BGS of those slots."""


class _SharedByLayers(NamedTuple):
    """What the layers of one step share.

    Args:
        new_rows: T.
        count_B: rows before the new ones.
        at_J: 0 .. J - 1.
        rows_BXJ: rows of all sets; None where each layer chooses its own.
    """

    new_rows: int
    count_B: Tensor
    at_J: Tensor
    rows_BXJ: Tensor | None


class SelectedCache(KVCache):
    """Until `begin` it is `store`; from then on a step reads the sets of `row_sets`, chosen as it starts.

    Rows are never dropped, so those of generated tokens can be chosen like those of the prompt. A draft that
    reads the prefix alone (`PrefixOnly`) reads all of it. Where every sequence fits the budget, steps are
    those of `store`, bit by bit.

    Args:
        store: holds the rows, none before position 0. Over an arena a step is the same operations for every
            length, and what it leaves to the next is updated in place (`tensors`).
    """

    def __init__(self, store: DenseCache | ArenaCache) -> None:
        self.store = store
        self.held = store.store if isinstance(store, ArenaCache) else store
        """Where the rows lie."""
        self.len_B = store.len_B
        self.row_sets: RowSets | None = None
        self._table_LG: Tensor | None = None
        self._ask: LayerScores | None = None
        self._masks = KernelMask()
        self._dense = False
        self._step: _SharedByLayers | None = None

    def begin(self, budget: ReadBudget, *, table_LG: Tensor | None, ask: LayerScores | None = None) -> None:
        """Decode sparsely from now on.

        Args:
            budget: see `ReadBudget`.
            table_LG: the set that each KV head of each layer reads, numbered from 0, int64; None: each has
                its own, and `ask` scores its rows.
            ask: called in every layer of a step whose sets were not chosen before it.

        Raises:
            ConfigError: a table of another shape, or a layer that there is not.
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
        known = self.row_sets
        if known is not None and (known.budget, *known.idx_BXK.shape[:2]) == (budget, B, n_sets):
            known.forget()  # a graph of a step may know its tensors
        else:
            self.row_sets = RowSets(budget, B, n_sets, device)

    def reserve(self, budget: ReadBudget, *, within_layers: bool = False) -> None:
        """Told before prompts are read what steps will read, and whether each layer chooses as it runs."""

    def _sizes(self) -> tuple[int, int, int]:
        """Layers, sequences, and KV heads of each."""
        L, B, G, _, _ = self.held.k_LBGSD.shape
        return L, B, G

    def choose(self, scores_BXS: Tensor | None) -> None:
        """Before every step: choose what it reads where that is due.

        Args:
            scores_BXS: of every set, see `choose_rows`, of `used` slots or more; None: `ask` is asked in each
                layer.

        Raises:
            ConfigError: scores of fewer slots, or of another number of sets.
        """
        assert self.row_sets is not None, "begin() comes first"
        self._step = None
        self.row_sets.open(self.len_B)
        if scores_BXS is None:
            return
        if scores_BXS.shape[-1] < self.used:
            scored = scores_BXS.shape[-1]
            raise refusal(ConfigError, f"scores of {scored} rows", f"those of all {self.used} in the cache")
        self.row_sets.put(scores_BXS)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Within the block steps read everything and nobody is asked."""
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
        """Attention over the chosen rows, those that were committed since, and the new ones."""
        sets, G = self.row_sets, self.held.k_LBGSD.shape[2]
        if sets is None or self._dense or isinstance(mask, PrefixOnly):
            return self.store.attend(layer, q_BHTD, mask=mask, scale=scale)
        if self._ask is not None:
            scores_BGS = self._ask(layer, q_BHTD, self.keys(layer), self.len_B)
            sets.put(scores_BGS, slice(layer * G, (layer + 1) * G))
        if layer in sets.budget.dense_layers or self._fits:
            return self.store.attend(layer, q_BHTD, mask=mask, scale=scale)
        k_BGJD, v_BGJD = self.chosen(layer, q_BHTD.shape[2])
        count_B = self._step_of(q_BHTD.shape[2]).count_B
        return tree_attention(q_BHTD, k_BGJD, v_BGJD, count_B, self._masks.of(mask), scale=scale)

    @property
    def used(self) -> int:
        """Slots that may hold committed rows, as far as the host knows: all of an arena's."""
        return self.store.slots if isinstance(self.store, ArenaCache) else self.store.used

    @property
    def _fits(self) -> bool:
        """Whether the host knows that every text fits the budget; of an arena's texts, until they end."""
        assert self.row_sets is not None
        most = self.store.claimed if isinstance(self.store, ArenaCache) else self.store.used
        return most <= self.row_sets.budget.rows

    def keys(self, layer: int) -> Tensor:
        """A layer's keys as k_BGSD, in the `used` slots; those from `len_B` on mean nothing."""
        return self.held.k_LBGSD[layer, :, :, : self.used]

    def chosen(self, layer: int, new_rows: int) -> tuple[Tensor, Tensor]:
        """K and V of the rows that a step of `new_rows` reads, each [B, G, J, D] (`RowSets.rows`)."""
        rows_BXJ, sets_G = self._rows_of(layer, new_rows)
        buffers = (self.held.k_LBGSD, self.held.v_LBGSD)
        if not runs_on(self.len_B.device):
            index = rows_BXJ[:, sets_G, :, None].expand(-1, -1, -1, buffers[0].shape[-1])
            return buffers[0][layer].gather(2, index), buffers[1][layer].gather(2, index)
        (B, X, J), (_, _, G, _, D) = rows_BXJ.shape, buffers[0].shape
        at_BXJ = self._step_of(new_rows).at_J.expand(B, X, J)
        lists = RowLists(at_BXJ, rows_BXJ, sets_G[None])
        goals = buffers[0].new_empty(2, 1, B, G, J, D)
        for goal, buffer in zip(goals, buffers, strict=True):
            move_rows(goal, buffer[layer : layer + 1], lists)
        return goals[0, 0], goals[1, 0]

    def _rows_of(self, layer: int, new_rows: int) -> tuple[Tensor, Tensor]:
        """Rows of some sets, rows_BXJ, and which of these sets each KV head of a layer reads."""
        sets, table_LG, step = self.row_sets, self._table_LG, self._step_of(new_rows)
        assert sets is not None and table_LG is not None
        if step.rows_BXJ is not None:
            return step.rows_BXJ, table_LG[layer]
        G = table_LG.shape[1]  # sets of the layer's own, chosen in it
        return sets.rows(slice(layer * G, (layer + 1) * G), self.held.capacity, new_rows), table_LG[0]

    def _step_of(self, new_rows: int) -> _SharedByLayers:
        """What all layers share, made by the first of them."""
        sets = self.row_sets
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
        """Rows up to the position at which plain decoding would choose anew."""
        return None if self.row_sets is None else self.row_sets.limit(self.len_B)

    def rows_left(self) -> int:
        """See `KVCache`."""
        return self.store.rows_left()

    def bytes(self) -> int:
        """Bytes of all rows, and of the sets."""
        return self.store.bytes() + (0 if self.row_sets is None else self.row_sets.bytes())

    def tensors(self) -> tuple[Tensor, ...] | None:
        """See `KVCache`; None over a cache that is not an arena."""
        own = self.store.tensors()
        if own is None or self.row_sets is None or self._table_LG is None or self._fits:
            return own
        return (*own, self._table_LG, *self.row_sets.tensors())


def check_layers(budget: ReadBudget, n_layers: int) -> None:
    """Refuse a budget that names a layer which there is not."""
    if any(layer >= n_layers for layer in budget.dense_layers):
        raise refusal(ConfigError, f"select.dense_layers={list(budget.dense_layers)}", f"0..{n_layers - 1}")
