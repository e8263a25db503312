"""Defines `Batch`, the micro-batch that every method takes, and builds one from a planned packed sequence.

Shapes: T tokens of one packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtrain.data.packing.pack import Plan
from longtrain.data.packing.prepared import Prepared

PADDING = "padding"


@dataclass(frozen=True)
class Batch:
    """One micro-batch: a packed sequence of documents.

    Args:
        ids_T: token ids, int64.
        bounds: document bounds on the host, from 0 to T; document d is `bounds[d]:bounds[d + 1]`. The last
            one may be padding (its loss mask is all False).
        loss_mask_T: bool; True where token t is a label (predicted from the tokens before it in its
            document). Never True at a document's first token.
        seed: seed of all randomness in this micro-batch (shifts, offsets); a function of the run's seed and
            the position in the data.
        tokens_in_step: labels in the whole optimiser step, over all ranks and accumulated micro-batches.
        names: a name for each document, for error messages.
        kinds: the text kind of each document (book, code, chat, ...).
        weights_T: optional fp32 weight of each label; None: all 1.
        host_mask_T: `loss_mask_T` on the host, set by `to`, so that finding the labels needs no device
            synchronisation; None: `loss_mask_T` itself is on the host.
        documents_in_step: documents with at least one label in the whole optimiser step, over all ranks and
            accumulated micro-batches.
    """

    ids_T: Tensor
    bounds: tuple[int, ...]
    loss_mask_T: Tensor
    seed: int
    tokens_in_step: int
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    weights_T: Tensor | None = None
    host_mask_T: Tensor | None = None
    documents_in_step: int = 0

    @property
    def host_labels(self) -> Tensor:
        """The loss mask on the host, bool_T; it is copied there if `to` has not kept it."""
        return self.loss_mask_T.cpu() if self.host_mask_T is None else self.host_mask_T

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on `device`; a copy of the mask stays on the host."""
        on_host = self.host_mask_T is None and self.loss_mask_T.device.type == "cpu"
        return replace(
            self,
            host_mask_T=self.loss_mask_T if on_host else self.host_mask_T,
            ids_T=self.ids_T.to(device, non_blocking=non_blocking),
            loss_mask_T=self.loss_mask_T.to(device, non_blocking=non_blocking),
            weights_T=None
            if self.weights_T is None
            else self.weights_T.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, so that copies to a GPU are asynchronous."""
        return replace(
            self,
            ids_T=self.ids_T.pin_memory(),
            loss_mask_T=self.loss_mask_T.pin_memory(),
            weights_T=None if self.weights_T is None else self.weights_T.pin_memory(),
        )


def batch_at(data: Prepared, plan: Plan, index: int, *, seed: int, pad_id: int = 0) -> Batch:
    """Build the micro-batch with global index `index`.

    Args:
        data: the prepared data that `plan` was made from.
        plan: packed sequences of the run.
        index: number of the packed sequence over all ranks and steps, 0..n_rows-1.
        seed: seed of the run; the batch's own seed is a function of it and `index`.
        pad_id: token that fills the rest of the sequence, as a last document without labels.

    Returns:
        A batch of exactly `plan.sequence_tokens[index]` tokens. No document's first token is a label.
    """
    row = plan.row(index)
    width = int(plan.sequence_tokens[index])
    ids_T = np.full(width, pad_id, np.int64)
    mask_T = np.zeros(width, bool)
    bounds = [0]
    for start, length in zip(row.start.tolist(), row.length.tolist(), strict=True):
        at, end = bounds[-1], bounds[-1] + length
        ids_T[at:end] = data.ids[start : start + length]
        # + 1: a document's first token has nothing to be predicted from
        mask_T[at + 1 : end] = data.mask[start + 1 : start + length]
        bounds.append(end)
    docs = row.doc.tolist()
    names = [data.names[doc] for doc in docs]
    kinds = [data.kinds[data.kind[doc]] for doc in docs]
    if bounds[-1] < width:
        bounds.append(width)
        names.append(PADDING)
        kinds.append(PADDING)
    step = index // plan.sequences_per_step
    return Batch(
        ids_T=torch.from_numpy(ids_T),
        bounds=tuple(bounds),
        loss_mask_T=torch.from_numpy(mask_T),
        seed=batch_seed(seed, index),
        tokens_in_step=int(plan.tokens_in_step[step]),
        documents_in_step=int(plan.documents_in_step[step]),
        names=tuple(names),
        kinds=tuple(kinds),
    )


def batch_seed(seed: int, index: int) -> int:
    """Return a seed below 2**63 derived from the run's seed and a global micro-batch index."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


class RankSequences(Dataset[Batch]):
    """A rank's share of a run: its i-th item is global micro-batch `i * world + rank`.

    Args:
        n_rows: micro-batches of all ranks.
        batch: makes the global micro-batch of an index.
        rank: this process.
        world: processes.
        start: items to leave out at the front.
    """

    def __init__(
        self, n_rows: int, batch: Callable[[int], Batch], *, rank: int = 0, world: int = 1, start: int = 0
    ) -> None:
        self.n_rows, self.batch = n_rows, batch
        self.rank, self.world, self.start = rank, world, start

    def __len__(self) -> int:
        return max(0, self.n_rows // self.world - self.start)

    def __getitem__(self, item: int) -> Batch:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return self.batch((self.start + item) * self.world + self.rank)

    def __iter__(self) -> Iterator[Batch]:
        return (self[item] for item in range(len(self)))
