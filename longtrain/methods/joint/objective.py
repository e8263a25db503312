"""The joint training objective: the sum of the members' mean losses, from one forward of the target."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain.methods.joint.config import member_keys
from longtrain.methods.joint.shared import SharedPass
from longtrain.methods.spec import Loss, MethodSpec, Objective

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.targets.model import Target


class JointObjective(Objective):
    """The members' objectives on the same packed sequence, each unchanged and unaware of the others.

    If one member's loss counts documents, the joint loss does, and the sums of members that count labels are
    multiplied by documents over labels of the optimiser step: so each member's gradient is that of training
    alone. Metrics are prefixed with the member's name: `eagle3/loss`.

    Args:
        module: name -> the member's module.
        target: the frozen target.
        members: name -> the method and its settings.
        lr_scales: name -> factor on the learning rate.
    """

    module: nn.ModuleDict
    target: Target

    def __init__(
        self,
        module: nn.ModuleDict,
        target: Target,
        members: dict[str, tuple[MethodSpec, Any]],
        lr_scales: dict[str, float],
    ) -> None:
        super().__init__()
        self.module, self.target = module, target
        self.shared = SharedPass(target, members)
        self.objectives = nn.ModuleDict()
        for name, (spec, settings) in members.items():
            assert spec.objective is not None
            seat: Any = self.shared.seats[name]
            with member_keys(name):
                self.objectives[name] = spec.objective(module[name], seat, settings)
        every = self.members.values()
        self.per_document = any(one.per_document for one in every)
        self.reads_top_tokens = all(one.reads_top_tokens for one in every)
        self.asks_target = any(one.asks_target for one in every)
        self.parts = tuple(members)
        self.lr_multipliers = {}
        for name, one in self.members.items():
            scale = lr_scales[name]
            self.lr_multipliers |= {
                f"{name}.{key}": times * scale for key, times in one.lr_multipliers.items()
            }
            if scale != 1.0:
                self.lr_multipliers[f"{name}.*"] = scale

    @property
    def members(self) -> dict[str, Objective]:
        """Objectives of the members, by name."""
        return dict(self.objectives.items())  # type: ignore[arg-type]

    def forward(self, batch: Batch) -> Loss:
        """Return the scaled sum of the members' losses, each one's metrics, and `loss`, their means' sum."""
        calls = {name: partial(one, batch) for name, one in self.members.items()}
        losses = self.shared.losses(calls, batch.ids_T.device)
        total = torch.stack([loss.total * self._scale(name, batch) for name, loss in losses.items()]).sum()
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        for name, loss in losses.items():
            count = torch.full((), loss.tokens, device=loss.total.device)
            mine = {"loss": (loss.total.detach(), count), **loss.metrics}
            metrics |= {f"{name}/{key}": pair for key, pair in mine.items()}
        leading = next(name for name, one in self.members.items() if one.per_document == self.per_document)
        metrics["loss"] = (total.detach(), metrics[f"{leading}/loss"][1])
        return Loss(total, max(loss.tokens for loss in losses.values()), metrics)

    def _scale(self, name: str, batch: Batch) -> float:
        """Return the factor on a member's summed loss that makes its gradient the one of training alone.

        The trainer divides the joint sum by one count: by the documents of the step if any member counts
        documents, else by its labels. A member that counts labels beside one that counts documents is
        therefore multiplied by documents / labels. For example, a sum of 60 over 30 labels of 3 documents is
        multiplied by 3 / 30; the trainer divides the product, 6, by 3 documents and gets 2, which is 60 / 30.
        """
        if self.members[name].per_document == self.per_document:
            return 1.0
        return batch.documents_in_step / max(batch.tokens_in_step, 1)
