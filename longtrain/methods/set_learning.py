"""Settings of modules that learn where the target's attention goes; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.settings import Count, CountOrZero, NotNegative, OneOf, check, wrong

BLOCK_BYTES = 256 << 20
"""Bytes of the scores of one block of queries in fp32; `BLOCKS` such tensors exist at once."""
BLOCKS = 12
"""Number of tensors of that size at once: the teacher's, the student's, and gradients."""
KEY_ROWS = 8192
"""Tokens of a packed sequence whose keys are computed at once."""


@dataclass
class SetLearning:
    """Settings of the sampled queries and the attention learned from them (`methods.set_objective`)."""

    pool: Annotated[str, OneOf("max", "mean")] = "max"  # how the target's attention is pooled over the query
    # heads of a KV head
    queries: Count = 128  # query positions of a document that are sampled for training
    by_mass: bool = True  # weight a query by its attention beyond the tokens that are always read; False: all
    # queries count alike
    sinks: CountOrZero = 4  # first tokens, which are always read and not learned from; at most an eighth of
    # the text
    window: CountOrZero = 64  # newest tokens likewise, at most half
    recall_weight: NotNegative = 0.0  # weight of an added loss: 1 - the soft share of the target's attention
    # that the choice covers
    recall_entries: Count = (
        512  # KV entries of that choice and of the logged recall, sinks and window included
    )

    def __post_init__(self) -> None:
        check(self, "method")
        if self.recall_entries <= self.sinks + self.window:
            raise wrong(
                "method.recall_entries",
                self.recall_entries,
                f"more than sinks and window, {self.sinks + self.window}",
            )
