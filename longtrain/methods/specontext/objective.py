"""The retrieval head's training objective: queries and keys of the head for `SetObjective`.

Shapes: T tokens of a packed sequence, R tokens, X sets, H query heads, G KV heads, D head dim, E hidden dim,
W embeddings mixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.data.packing import packed_sequences
from longtrain.layers import cast_to
from longtrain.methods.attention_teacher import Teacher
from longtrain.methods.rope import ModuleRope
from longtrain.methods.set_objective import ReadRow, SetObjective
from longtrain.methods.specontext.config import Config, key_offset
from longtrain.methods.specontext.modules import RetrievalHead

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.spec import Loss
    from longtrain.targets.model import Target


class RetrievalObjective(SetObjective):
    """Trains a retrieval head (`SetObjective`); with `mapping=calibrated` it also finds each KV head's set.

    Args:
        module: the head.
        target: the frozen target.
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
        """Return the loss (see `SetObjective`); sum the evidence of all ranks' batches on every rank."""
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

    def learned(self, teacher: Teacher, probs_XRS: Tensor, rows: int) -> None:
        """Add the share of each KV head's attention that each set covers to the evidence."""
        if self.config.mapping == "calibrated":
            teacher.add_evidence(probs_XRS, rows, self.module.evidence_LGX)

    def queries(self, row: ReadRow, at_R: Tensor, drawn: slice) -> Tensor:
        """Compute the head's queries at these positions (see `SetObjective`)."""
        return self.module.query(self._entry(row, at_R), self._turn(row, at_R))

    def keys(self, row: ReadRow, start: int, stop: int) -> Tensor:
        """Compute the head's keys of tokens start..stop (see `SetObjective`)."""
        at_R = torch.arange(start, stop, device=row.batch.ids_T.device)
        return self.module.key(self._entry(row, at_R), self._turn(row, at_R))

    def _turn(self, row: ReadRow, at_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary cos and sin of these tokens' positions in their documents."""
        pos_T = packed_sequences.positions(row.batch.bounds).to(at_R.device, non_blocking=True)
        return self.rope(pos_T[at_R])

    def _entry(self, row: ReadRow, at_R: Tensor) -> Tensor:
        """Return the inputs of the projections to queries and keys for some tokens."""
        bounds = torch.tensor(row.batch.bounds, device=at_R.device)
        first_R = bounds[torch.searchsorted(bounds, at_R, right=True) - 1]
        head, ids_T = self.module, row.batch.ids_T
        if head.mix is not None:
            back_W = torch.arange(len(head.mix) - 1, -1, -1, device=at_R.device)
            place_RW = at_R[:, None] - back_W
            # embeddings of another document become zeros
            inside = place_RW >= first_R[:, None]
            embed = cast_to(self.module.q_proj.weight, self.target.embed(ids_T[place_RW.clamp(min=0)]))
            return head.entry(embed * inside[..., None], ())
        embed = cast_to(self.module.q_proj.weight, self.target.embed(ids_T[at_R]))
        begun_R1 = (at_R > first_R)[:, None]
        states = [row.hidden[layer][(at_R - 1).clamp(min=0)] * begun_R1 for layer in head.hidden]
        return head.entry(embed, [cast_to(self.module.q_proj.weight, state) for state in states])
