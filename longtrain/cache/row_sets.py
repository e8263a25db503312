"""Which committed rows a decoding step reads: how many, which in any case, and until when.

A set is chosen among the rows that are committed when a step begins, and is good for the next `every`
positions; what follows those rows is read beside it. Within that stretch no step asks anybody anew, whether
it takes one position or several, and no step goes beyond it (`RowSets.limit`). So the rows that a position
reads do not depend on how many positions are taken at once: speculation repeats the text of plain decoding.

Shapes: B batch, X sets, S slots, K rows of a set, J rows that a step reads, T new rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.kernels import row_choice
from longtrain.settings import Count, CountOrZero, Words, check


@dataclass(frozen=True)
class ReadBudget:
    """How many rows a KV head reads at each step, and which of them in any case.

    Args:
        rows: rows of a set, those that are in it in any case included. Texts that are not longer are read
            whole.
        sinks: first rows, always in the set.
        window: last rows at the time of the choice, always in the set.
        every: positions that a set is good for. 1: each is chosen for anew, and a draft has no use.
        dense_layers: layers that read everything.

    Raises:
        ConfigError: no row is left to choose, or a value is out of range.
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
                f"a budget of {self.rows} rows, of which {self.sinks} sinks and the last {self.window} are "
                f"read in any case; allowed: {self.sinks + self.window + 1} rows or more, or a smaller "
                "window (select.window=8; {artifact: NAME, window: 8} in suite.systems)"
            )


def choose_rows(scores_BXS: Tensor, len_B: Tensor, budget: ReadBudget) -> Tensor:
    """The rows with the highest scores, beside those that are read in any case.

    Of equal scores the later row is taken, so that the choice does not depend on the number of slots
    (`kernels.row_choice`).

    Args:
        scores_BXS: of the rows in slots 0..S-1, in fp32 or wider, compared in fp32; of slots from `len_B` on
            of no meaning.
        len_B: committed rows, int64.
        budget: see `ReadBudget`.

    Returns:
        idx_BXK, int64, K = `budget.rows`: `min(K, len_B)` rows, ascending; what follows is 0.
    """
    found = len_B.new_empty(*scores_BXS.shape[:2], budget.rows, dtype=torch.int64)
    row_choice.choose_rows(scores_BXS, len_B, found, sinks=budget.sinks, window=budget.window)
    return found


class RowSets:
    """The sets of a batch. Everything lies on the device and is updated in place.

    Args:
        budget: see `ReadBudget`.
        batch: sequences.
        n_sets: sets of each.
        device: of the sets.
    """

    def __init__(self, budget: ReadBudget, batch: int, n_sets: int, device: torch.device) -> None:
        self.budget = budget
        self.idx_BXK = torch.zeros(batch, n_sets, budget.rows, dtype=torch.int64, device=device)
        """Chosen rows, the first `n_B` of each set, ascending."""
        self.n_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.since_B = torch.zeros_like(self.n_B)
        """Rows that were committed when the sets were chosen; rows from here on are read in any case."""
        self.due_B = torch.ones_like(self.n_B, dtype=torch.bool)
        """Sequences whose sets are chosen at this step."""
        self._until_B = torch.zeros_like(self.n_B)

    def forget(self) -> None:
        """Nothing is chosen: new texts begin."""
        for tensor in self.tensors():
            tensor.zero_()
        self.due_B.fill_(True)

    def open(self, len_B: Tensor) -> None:
        """A step over `len_B` committed rows begins."""
        torch.ge(len_B, self._until_B, out=self.due_B)
        torch.where(self.due_B, len_B, self.since_B, out=self.since_B)
        torch.add(self.since_B, self.budget.every, out=self._until_B)
        torch.clamp(self.since_B, max=self.budget.rows, out=self.n_B)

    def due(self, len_B: Tensor) -> Tensor:
        """Sequences that the coming step, over `len_B` committed rows, chooses for."""
        return len_B >= self._until_B

    def put(self, scores_BXS: Tensor, sets: slice = slice(None)) -> None:
        """Choose some of the sets, in sequences that are due.

        Args:
            scores_BXS: see `choose_rows`.
            sets: which sets these are.

        Raises:
            ConfigError: scores of another number of sequences or sets.
        """
        own = self.idx_BXK[:, sets]
        if scores_BXS.shape[:2] != own.shape[:2]:
            raise ConfigError(
                f"scores of [sequences, sets] = {list(scores_BXS.shape[:2])}; allowed: {list(own.shape[:2])}"
            )
        sinks, window = self.budget.sinks, self.budget.window
        row_choice.choose_rows(scores_BXS, self.since_B, own, sinks=sinks, window=window, due_B=self.due_B)

    def limit(self, len_B: Tensor) -> Tensor:
        """Rows of each sequence that may be committed before a choice other than that of the coming step."""
        left_B = self._until_B - len_B
        return left_B.where(left_B > 0, self.budget.every)

    def read(self, new_rows: int) -> int:
        """J, the rows that a step of `new_rows` reads at most."""
        return self.budget.rows + self.budget.every - 1 + new_rows

    def rows(self, sets_G: Tensor | slice, slots: int, new_rows: int) -> Tensor:
        """Slots that a step reads: of each set's rows, then of all rows since, new ones included.

        Args:
            sets_G: the set that each KV head reads, int64; or a slice of the sets themselves.
            slots: slots of a sequence; those beyond are not named.
            new_rows: T.

        Returns:
            rows_BGJ, int64; of a sequence the first `n_B + len_B - since_B + T` count.
        """
        J = self.read(new_rows)
        at_J = torch.arange(J, device=self.n_B.device)
        near_BJ = self.since_B[:, None] + at_J - self.n_B[:, None]
        chosen_BGJ = torch.nn.functional.pad(self.idx_BXK[:, sets_G], (0, J - self.budget.rows))
        inside_BJ = at_J < self.n_B[:, None]
        return torch.where(inside_BJ[:, None], chosen_BGJ, near_BJ[:, None]).clamp(0, slots - 1)

    def tensors(self) -> tuple[Tensor, ...]:
        """What steps read and write."""
        return self.idx_BXK, self.n_B, self.since_B, self.due_B, self._until_B

    def bytes(self) -> int:
        """Bytes of the sets."""
        return sum(tensor.nbytes for tensor in self.tensors())
