"""What the indexer's queries and keys are made of in training.

Shapes: R query rows, L layers, H query heads, G KV heads, I index dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.methods.indexer.modules import Indexer
from longtrain.methods.set_objective import ReadRow, SetObjective


class IndexerObjective(SetObjective):
    """See `SetObjective`: each layer's KV head is the only teacher of its set."""

    module: Indexer

    def queries(self, row: ReadRow, at_R: Tensor, drawn: slice) -> Tensor:
        """See `SetObjective`."""
        return self.module.query(torch.stack([q_HRD[:, drawn] for q_HRD in row.q_LHRD.values()]))

    def keys(self, row: ReadRow, start: int, stop: int) -> Tensor:
        """See `SetObjective`."""
        return self.module.key(torch.stack([k_GTD[:, start:stop] for k_GTD in row.k_LGTD.values()]))
