"""Sets of committed KV entries that decoding steps read: their size, fixed members and lifetime.

A set is selected among the entries committed when a step begins, and is valid for the next `every` positions;
entries committed since are always read too. Within these positions no step selects again, whether it commits
one position or several, and no step crosses their end (`EntrySets.limit`). So the entries that a position
reads do not depend on the number of positions per step: speculation gives the text of plain decoding.

Shapes: B batch, X sets, S cache positions, K entries of a set, J entries that a step reads, T new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.kernels import top_entries
from longtrain.settings import Count, CountOrZero, Words, check


@dataclass(frozen=True)
class ReadBudget:
    """Number of KV entries that a KV head reads at each step, and those that are always among them.

    Args:
        rows: number of entries of a set, `sinks` and `window` included. Shorter sequences are read whole.
        sinks: number of first entries, always in the set.
        window: number of last entries at the time of selection, always in the set.
        every: positions that a set is valid for. 1: a new selection at each position, which excludes drafts.
        dense_layers: layers that read everything.

    Raises:
        ConfigError: no entry is left to select, or a value is out of range.
    """

    rows: Count = 1024
    sinks: CountOrZero = 4
    window: CountOrZero = 64
    every: Count = 1
    dense_layers: Annotated[tuple[CountOrZero, ...], Words("layer numbers, 0 or more")] = ()

    def __post_init__(self) -> None:
        check(self, "select")
        if self.rows <= self.sinks + self.window:
            raise ConfigError(
                f"a budget of {self.rows} entries, of which {self.sinks} sinks and the last {self.window} "
                f"are always read; allowed: {self.sinks + self.window + 1} or more, or a smaller "
                "window (select.window=8; {artifact: NAME, window: 8} in suite.systems)"
            )


def choose_entries(scores_BXS: Tensor, len_B: Tensor, budget: ReadBudget) -> Tensor:
    """Select the entries with the highest scores, beside sinks and window (`kernels.top_entries`).

    Ties go to the later entry, so that the selection does not depend on the number of positions.

    Args:
        scores_BXS: scores in fp32 or wider, compared in fp32; positions from `len_B` on are ignored.
        len_B: committed entries, int64.
        budget: size of the sets.

    Returns:
        idx_BXK, int64, K = `budget.rows`: `min(K, len_B)` positions, ascending, then 0.
    """
    found = len_B.new_empty(*scores_BXS.shape[:2], budget.rows, dtype=torch.int64)
    top_entries.choose_entries(scores_BXS, len_B, found, sinks=budget.sinks, window=budget.window)
    return found


class EntrySets:
    """The sets of a batch. All tensors are on the device and are updated in place.

    Args:
        budget: size of the sets.
        batch: sequences.
        n_sets: sets of each sequence.
        device: device of the tensors.
    """

    def __init__(self, budget: ReadBudget, batch: int, n_sets: int, device: torch.device) -> None:
        self.budget = budget
        self.idx_BXK = torch.zeros(batch, n_sets, budget.rows, dtype=torch.int64, device=device)
        """Selected positions, the first `n_B` of each set, ascending."""
        self.n_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.since_B = torch.zeros_like(self.n_B)
        """Number of entries committed when the sets were selected; entries from here on are always read."""
        self.due_B = torch.ones_like(self.n_B, dtype=torch.bool)
        """Sequences whose sets are selected at this step."""
        self._until_B = torch.zeros_like(self.n_B)

    def forget(self) -> None:
        """Reset all sets, for new sequences in the same tensors."""
        for tensor in self.tensors():
            tensor.zero_()
        self.due_B.fill_(True)

    def open(self, len_B: Tensor) -> None:
        """Begin a step over `len_B` committed entries: update the sequences that are due."""
        torch.ge(len_B, self._until_B, out=self.due_B)
        torch.where(self.due_B, len_B, self.since_B, out=self.since_B)
        torch.add(self.since_B, self.budget.every, out=self._until_B)
        torch.clamp(self.since_B, max=self.budget.rows, out=self.n_B)

    def due(self, len_B: Tensor) -> Tensor:
        """Sequences whose sets the coming step, over `len_B` committed entries, selects."""
        return len_B >= self._until_B

    def put(self, scores_BXS: Tensor, sets: slice = slice(None)) -> None:
        """Select some of the sets, in sequences that are due.

        Args:
            scores_BXS: see `choose_entries`.
            sets: indices of these sets.

        Raises:
            ConfigError: scores of another number of sequences or sets.
        """
        own = self.idx_BXK[:, sets]
        if scores_BXS.shape[:2] != own.shape[:2]:
            raise ConfigError(
                f"scores of [sequences, sets] = {list(scores_BXS.shape[:2])}; allowed: {list(own.shape[:2])}"
            )
        sinks, window = self.budget.sinks, self.budget.window
        top_entries.choose_entries(
            scores_BXS, self.since_B, own, sinks=sinks, window=window, due_B=self.due_B
        )

    def limit(self, len_B: Tensor) -> Tensor:
        """Most tokens of each sequence that may be committed before the next selection."""
        left_B = self._until_B - len_B
        return left_B.where(left_B > 0, self.budget.every)

    def read(self, new_rows: int) -> int:
        """J, the most entries that a step of `new_rows` tokens reads."""
        return self.budget.rows + self.budget.every - 1 + new_rows

    def rows(self, sets_G: Tensor | slice, slots: int, new_rows: int) -> Tensor:
        """Positions that a step reads: each set's entries, then all entries since, new ones included.

        Args:
            sets_G: index of the set that each KV head reads, int64; or a slice of the sets themselves.
            slots: capacity of a sequence; positions are clamped to it.
            new_rows: T.

        Returns:
            rows_BGJ, int64; the first `n_B + len_B - since_B + T` of each sequence are valid.
        """
        J = self.read(new_rows)
        at_J = torch.arange(J, device=self.n_B.device)
        near_BJ = self.since_B[:, None] + at_J - self.n_B[:, None]
        chosen_BGJ = torch.nn.functional.pad(self.idx_BXK[:, sets_G], (0, J - self.budget.rows))
        inside_BJ = at_J < self.n_B[:, None]
        return torch.where(inside_BJ[:, None], chosen_BGJ, near_BJ[:, None]).clamp(0, slots - 1)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that decoding steps read and write."""
        return self.idx_BXK, self.n_B, self.since_B, self.due_B, self._until_B

    def bytes(self) -> int:
        """Bytes of the sets."""
        return sum(tensor.nbytes for tensor in self.tensors())
