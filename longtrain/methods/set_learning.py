"""Settings of modules that learn where the target's attention goes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.settings import Count, CountOrZero, NotNegative, OneOf, check, wrong

BLOCK_BYTES = 256 << 20
"""Bytes of the scores of one block of query rows in fp32; `BLOCKS` such tensors exist at once."""
BLOCKS = 12
"""Tensors of that size at once: the teacher's, the student's, and gradients."""
KEY_ROWS = 8192
"""Rows of a packed row whose keys are computed at once."""


@dataclass
class SetLearning:
    """Which query rows are learned of, and what of their attention (`methods.set_objective`)."""

    pool: Annotated[str, OneOf("max", "mean")] = "max"  # teacher: over the query heads of a KV head
    queries: Count = 128  # sampled query rows of a document, from which a label is told
    by_mass: bool = True  # a query row counts as much as the attention that it has beyond the rows that are
    # read in any case; False: all count alike, though most rows of most layers need nothing more
    sinks: CountOrZero = 4  # first rows that nothing is learned of, at most an eighth: they are always read
    window: CountOrZero = 64  # last rows likewise, at most half
    recall_weight: NotNegative = 0.0  # of 1 - the soft share of the teacher's mass in a set
    recall_rows: Count = 512  # rows of that set, and of the figures, sinks and window included

    def __post_init__(self) -> None:
        check(self, "method")
        if self.recall_rows <= self.sinks + self.window:
            raise wrong(
                "method.recall_rows",
                self.recall_rows,
                f"more than sinks and window, {self.sinks + self.window}",
            )
