"""What the retrieval head's queries and keys are made of in training.

Shapes: T tokens of a packed row, R rows, X sets, H query heads, G KV heads, D head dim, E hidden dim, W
embeddings mixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.data.rows import packed_rows
from longtrain.methods.attention_teacher import Teacher
from longtrain.methods.rope import ModuleRope
from longtrain.methods.set_objective import ReadRow, SetObjective
from longtrain.methods.specontext.config import Config, key_offset
from longtrain.methods.specontext.modules import RetrievalHead

if TYPE_CHECKING:
    from longtrain.data.rows.batch import Batch
    from longtrain.methods.spec import Loss
    from longtrain.targets.model import Target


class RetrievalObjective(SetObjective):
    """See `SetObjective`; with `mapping=calibrated` it also finds out which set each KV head is to read.

    Args:
        module: the head.
        target: frozen.
        config: hyperparameters.

    Note: the paper trains nothing.
    """

    module: RetrievalHead

    def __init__(self, module: RetrievalHead, target: Target, config: Config) -> None:
        super().__init__(module, target, config)
        self.config, self.rope = config, ModuleRope(config, target)
        self.hidden = module.hidden
        self.key_offset = key_offset(config)

    def forward(self, batch: Batch) -> Loss:
        """See `SetObjective`; what the batches of all ranks are evidence of counts on each of them."""
        if not (self.module.training and self.config.mapping == "calibrated"):
            return super().forward(batch)
        evidence_LGX = self.module.evidence_LGX
        before_LGX = evidence_LGX.clone()
        loss = super().forward(batch)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            found_LGX = evidence_LGX - before_LGX
            torch.distributed.all_reduce(found_LGX)
            torch.add(before_LGX, found_LGX, out=evidence_LGX)
        self.module.remap()
        return loss

    def learned(self, teacher: Teacher, law_XRS: Tensor, rows: int) -> None:
        """Evidence of what each KV head's attention each set holds."""
        if self.config.mapping == "calibrated":
            teacher.add_evidence(law_XRS, rows, self.module.evidence_LGX)

    def queries(self, row: ReadRow, at_R: Tensor, drawn: slice) -> Tensor:
        """See `SetObjective`."""
        return self.module.query(self._entry(row, at_R), self._turn(row, at_R))

    def keys(self, row: ReadRow, start: int, stop: int) -> Tensor:
        """See `SetObjective`."""
        at_R = torch.arange(start, stop, device=row.batch.ids_T.device)
        return self.module.key(self._entry(row, at_R), self._turn(row, at_R))

    def _turn(self, row: ReadRow, at_R: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary of these rows' positions in their documents."""
        pos_T = packed_rows.positions(row.batch.bounds).to(at_R.device, non_blocking=True)
        return self.rope(pos_T[at_R])

    def _entry(self, row: ReadRow, at_R: Tensor) -> Tensor:
        """What queries and keys of some packed rows are projected from."""
        bounds = torch.tensor(row.batch.bounds, device=at_R.device)
        first_R = bounds[torch.searchsorted(bounds, at_R, right=True) - 1]
        head, ids_T = self.module, row.batch.ids_T
        if head.mix is not None:
            back_W = torch.arange(len(head.mix) - 1, -1, -1, device=at_R.device)
            place_RW = at_R[:, None] - back_W
            inside = place_RW >= first_R[:, None]
            embed = self._mine(self.target.embed(ids_T[place_RW.clamp(min=0)]))
            return head.entry(embed * inside[..., None], ())
        embed = self._mine(self.target.embed(ids_T[at_R]))
        begun_R1 = (at_R > first_R)[:, None]
        states = [row.hidden[layer][(at_R - 1).clamp(min=0)] * begun_R1 for layer in head.hidden]
        return head.entry(embed, [self._mine(state) for state in states])

    def _mine(self, x: Tensor) -> Tensor:
        """What the target gave in the module's dtype, where autocast does not see to it."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.module.q_proj.weight.dtype)
