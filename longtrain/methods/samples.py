"""Splits the documents of a packed sequence into prompt and response on the host, for eviction methods."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from longtrain.errors import DataError

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch


@dataclass(frozen=True)
class Sample:
    """A document with a response: tokens `start..prompt` are the prompt, `prompt..stop` the response."""

    start: int
    prompt: int
    stop: int

    @property
    def length(self) -> int:
        """Number of prompt tokens."""
        return self.prompt - self.start


def samples(batch: Batch) -> list[Sample]:
    """Return the prompt and the response of every document that has labels.

    The response is the last run of labels (the last answer of a chat); all before it is prompt. What follows
    the run is ignored: by causality it changes neither.

    Raises:
        DataError: a response without a prompt.
    """
    mask_T = batch.host_labels
    found = []
    for number, (start, end) in enumerate(pairwise(batch.bounds)):
        labels = mask_T[start:end].nonzero()[:, 0]
        if not len(labels):
            continue
        stop = int(labels[-1]) + 1
        gaps = (labels.diff() > 1).nonzero()[:, 0]
        first = int(labels[int(gaps[-1]) + 1]) if len(gaps) else int(labels[0])
        if first < 1:
            name = batch.names[number] if number < len(batch.names) else f"number {number}"
            raise DataError(
                f"document {name} is all response (labels from its first token on); importance needs a "
                "prompt before it; check the label masks with: longtrain prepare"
            )
        found.append(Sample(start, start + first, start + stop))
    return found
