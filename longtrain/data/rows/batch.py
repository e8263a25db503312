"""One micro-batch, as every method takes it, and how a planned row becomes one.

Shapes: T tokens of one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from longtrain.data.rows.pack import Plan
from longtrain.data.rows.prepared import Prepared

PADDING = "padding"


@dataclass(frozen=True)
class Batch:
    """One packed row of documents: a micro-batch.

    Args:
        ids_T: token ids, int64.
        bounds: document bounds on the host, from 0 to T; document d is `bounds[d]:bounds[d + 1]`. The last
            one may be padding (its loss mask is all False).
        loss_mask_T: bool; token t is a label to be learned (predicted from the tokens before it in its
            document). Never True at a document's first token.
        seed: the seed of all randomness in this micro-batch (shifts, offsets); a function of run seed and
            data position.
        tokens_in_step: supervised labels in the whole optimizer step, over all ranks and accumulated
            micro-batches.
        names: one name a document, for error messages.
        kinds: one text kind a document (book, code, chat, ...).
        weights_T: optional fp32 weight of each label; None: all 1.
        host_mask_T: `loss_mask_T` on the host, kept by `to`, so that nobody waits for a device to learn which
            rows count; None: `loss_mask_T` never left the host.
        documents_in_step: documents with at least one label in the whole optimizer step, over all ranks and
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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`; bounds, names and a copy of the mask stay on the host."""
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
        """The batch with its tensors in page-locked memory, so that copies to a GPU do not wait."""
        return replace(
            self,
            ids_T=self.ids_T.pin_memory(),
            loss_mask_T=self.loss_mask_T.pin_memory(),
            weights_T=None if self.weights_T is None else self.weights_T.pin_memory(),
        )


def batch_at(data: Prepared, plan: Plan, index: int, *, seed: int, pad_id: int = 0) -> Batch:
    """The micro-batch with global index `index`.

    Args:
        data: what `plan` was made from.
        plan: rows of the run.
        index: the number of the row over all ranks and steps, 0..n_rows-1.
        seed: the seed of the run; the batch's own seed is a function of it and `index`.
        pad_id: fills the rest of the row, as a last document without labels.

    Returns:
        A batch of exactly `plan.row_tokens[index]` tokens. No document's first token is a label.
    """
    row = plan.row(index)
    width = int(plan.row_tokens[index])
    ids_T = np.full(width, pad_id, np.int64)
    mask_T = np.zeros(width, bool)
    bounds = [0]
    for start, length in zip(row.start.tolist(), row.length.tolist(), strict=True):
        at, end = bounds[-1], bounds[-1] + length
        ids_T[at:end] = data.ids[start : start + length]
        mask_T[at + 1 : end] = data.mask[start + 1 : start + length]
        bounds.append(end)
    docs = row.doc.tolist()
    names = [data.names[doc] for doc in docs]
    kinds = [data.kinds[data.kind[doc]] for doc in docs]
    if bounds[-1] < width:
        bounds.append(width)
        names.append(PADDING)
        kinds.append(PADDING)
    step = index // plan.rows_per_step
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
    """A seed below 2**63 from the run's seed and a global micro-batch index."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
