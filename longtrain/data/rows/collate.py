"""Turns one planned row into a `Batch`: ids, document bounds, label mask, seed and the step's counts.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

import numpy as np
import torch

from longtrain.data.rows.batch import Batch
from longtrain.data.rows.pack import Plan
from longtrain.data.rows.prepared import Prepared

PADDING = "padding"


def batch_at(data: Prepared, plan: Plan, index: int, *, seed: int, pad_id: int = 0) -> Batch:
    """The micro-batch with global index `index`.

    Args:
        data: what `plan` was made from.
        plan: rows of the run.
        index: over all ranks and steps, 0..n_rows-1.
        seed: of the run; the batch's own seed is a function of it and `index`.
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
