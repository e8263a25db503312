"""The one LightningModule, which wraps an objective and an optimiser and is independent of the method.

Shapes: T tokens of one packed sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from longtrain.data.packing.batch import Batch
from longtrain.errors import DataError
from longtrain.methods.spec import Loss, Objective
from longtrain.training.optim import Optim
from longtrain.training.pooling import Number, Pool
from longtrain.training.ranks import fix_buckets
from longtrain.training.zero import RowPrecision, engine_of


class TrainModule(LightningModule):
    """Trains the module of an objective.

    An objective returns the *sum* of its loss over a micro-batch's labels, or over its documents with labels
    (`Objective.per_document`). Lightning divides a loss by the accumulated micro-batches and averages
    gradients over ranks; the factor `accumulate * ranks / tokens_in_step` (or `documents_in_step`) turns this
    into the gradient of the mean over all labels (documents) of the optimiser step, however they are
    distributed.

    Args:
        objective: maps a batch to a loss; its `module` is trained, its `target` is no part of this module.
        optim: optimiser and schedule.
        facts: settings that a checkpoint must share with the run that resumes from it; saved in every
            checkpoint.
    """

    def __init__(self, objective: Objective, optim: Optim, *, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.objective = objective
        self.optim = optim
        self.facts = dict(facts or {})
        self.pool = Pool()
        self.val_pool = Pool()
        self.seen = {"tokens": 0, "documents": 0, "rows": 0, "sequence_tokens": 0, "seconds": 0.0}
        self.resume: Callable[[], None] | None = None
        """Restores a checkpoint, when there is one to start from."""
        self.after_resume: Callable[[], None] | None = None
        """Called once, before the first batch after a resume."""
        self._grad_norms: dict[str, Number] = {}

    @property
    def trained(self) -> nn.Module:
        """The trained module, whose tensors are optimised, saved and exported."""
        return self.objective.module

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, scaled so that the step's gradient is that of the mean.

        Raises:
            DataError: the optimiser step has no labels.
        """
        by_document = self.objective.per_document
        count = batch.documents_in_step if by_document else batch.tokens_in_step
        if count <= 0:
            what = "document with a supervised token" if by_document else "supervised token"
            raise DataError(
                f"optimizer step {self.trainer.global_step + 1} has no {what} (documents: "
                f"{', '.join(batch.names[:8])}); check the label masks with: longtrain prepare"
            )
        loss = self._loss(batch)
        self.pool.add(loss, batch)
        spread = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return loss.total * (spread / count)  # undoes Lightning's division by accumulation and ranks

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the metrics of one held-out micro-batch."""
        self.val_pool.add(self._loss(batch), batch)

    def _loss(self, batch: Batch) -> Loss:
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, RowPrecision):
            with plugin.autocast(self.trainer.strategy.root_device.type):
                return self.objective(batch)
        return self.objective(batch)

    def configure_optimizers(self) -> Any:
        """Build the optimiser and its schedule from `optim`; parameter names are those of the trained module.

        The objective's own learning-rate factors apply to names that `optim.lr_multipliers` does not have.
        """
        scaled = str(self.trainer.precision) == "16-mixed"  # its loss scaler must unscale before clipping
        mine = {**self.optim.lr_multipliers}
        mine |= {key: value for key, value in self.objective.lr_multipliers.items() if key not in mine}
        optimizer, schedule = replace(self.optim, lr_multipliers=mine).build(
            self.trained.named_parameters(),
            max_steps=self.trainer.max_steps,
            fused=self.trainer.strategy.root_device.type == "cuda" and not scaled,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, or each of `Objective.parts` by its own, and record the norms as metrics.

        DeepSpeed clips inside its engine.
        """
        if isinstance(self.trainer.precision_plugin, RowPrecision):
            return
        limit = float(gradient_clip_val) if gradient_clip_val else math.inf
        parts = {f"{name}/grad_norm": self.trained.get_submodule(name) for name in self.objective.parts}
        norms: dict[str, Number] = {}
        for name, part in (parts or {"grad_norm": self}).items():
            trained = [value for value in part.parameters() if value.grad is not None]
            norms[name] = nn.utils.clip_grad_norm_(trained, limit)
        if parts:
            norms["grad_norm"] = torch.linalg.vector_norm(
                torch.stack([torch.as_tensor(norm, device=self.device) for norm in norms.values()])
            )
        self._grad_norms = norms

    def end_step(self) -> None:
        """End the record of the optimiser step just taken, and add its learning rate and gradient norms."""
        step = self.trainer.global_step
        rate = self.optim.lr * self.optim.factor(step - 1, max_steps=self.trainer.max_steps)
        extra: dict[str, Number] = {"lr": rate}
        if engine := engine_of(self.trainer):
            self._grad_norms = {"grad_norm": engine.grad_norm()}
        self.pool.close(step, {**extra, **self._grad_norms})

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a `Batch` asynchronously (a frozen dataclass, which Lightning does not move by itself)."""
        if not isinstance(batch, Batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch.to(device, non_blocking=True)

    def on_fit_start(self) -> None:
        """Restore the checkpoint: Lightning calls this on every rank once its strategy is set up."""
        fix_buckets(self.trainer)
        if self.resume is not None:
            self.resume()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After a resume, restore the random state that the run had at this point."""
        if self.after_resume is not None:
            self.after_resume()
            self.after_resume = None
