"""The indexer's training objective: queries and keys of the index for `SetObjective`.

Shapes: R queries, L layers, H query heads, G KV heads, I index dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.methods.indexer.modules import Indexer
from longtrain.methods.set_objective import ReadRow, SetObjective


class IndexerObjective(SetObjective):
    """Trains an indexer (`SetObjective`); each layer's KV head is the only teacher of its set."""

    module: Indexer

    def queries(self, row: ReadRow, at_R: Tensor, drawn: slice) -> Tensor:
        """Project the target's queries at the sampled positions (see `SetObjective`)."""
        return self.module.query(torch.stack([q_HRD[:, drawn] for q_HRD in row.q_LHRD.values()]))

    def keys(self, row: ReadRow, start: int, stop: int) -> Tensor:
        """Project the target's keys (see `SetObjective`)."""
        return self.module.key(torch.stack([k_GTD[:, start:stop] for k_GTD in row.k_LGTD.values()]))
