"""The one LightningModule: it knows an objective and an optimizer, and nothing of any method.

Shapes: T tokens of one packed row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from longtrain.data.rows.batch import Batch
from longtrain.errors import ArtifactError, DataError
from longtrain.methods.spec import Objective
from longtrain.training.figures import Number, Pool
from longtrain.training.optim import Optim


class TrainModule(LightningModule):
    """Trains what an objective holds.

    An objective returns the *sum* of its loss over a micro-batch's labels, or over its documents with labels
    (`Objective.per_document`). Lightning divides a loss by the accumulated micro-batches and averages
    gradients over ranks; `accumulate * ranks / tokens_in_step` (or `documents_in_step`) makes of that the
    gradient of the mean over all labels (documents) of the optimizer step, however they are spread.

    Args:
        objective: maps a batch to a loss; its `target`, if any, is frozen and never saved.
        optim: optimizer and schedule.
        facts: what a checkpoint must agree on with the run that resumes from it; saved in every checkpoint.
    """

    def __init__(self, objective: Objective, optim: Optim, *, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.objective = objective
        self.optim = optim
        self.facts = dict(facts or {})
        self.pool = Pool()
        self.val_pool = Pool()
        self.seen = {"tokens": 0, "documents": 0, "rows": 0, "row_tokens": 0, "seconds": 0.0}
        self._grad_norm: Tensor | None = None
        self._rng: list[dict[str, Any]] | None = None

    def setup(self, stage: str) -> None:
        """Keep DDP from broadcasting the frozen target at every start."""
        trained = self.trained_names()
        everything = [name for name, _ in self.named_parameters()] + [
            name for name, _ in self.named_buffers()
        ]
        self._ddp_params_and_buffers_to_ignore = [name for name in everything if name not in trained]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch, scaled so that the step's gradient is that of its mean.

        Raises:
            DataError: the optimizer step has nothing to learn from.
        """
        by_document = self.objective.per_document
        count = batch.documents_in_step if by_document else batch.tokens_in_step
        if count <= 0:
            what = "document with a supervised token" if by_document else "supervised token"
            raise DataError(
                f"optimizer step {self.trainer.global_step + 1} has no {what} (documents: "
                f"{', '.join(batch.names[:8])}); check the label masks with: longtrain prepare"
            )
        loss = self.objective(batch)
        self.pool.add(loss, batch)
        spread = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return loss.total * (spread / count)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Pool the figures of one held-out micro-batch."""
        self.val_pool.add(self.objective(batch), batch)

    def configure_optimizers(self) -> Any:
        """AdamW and its schedule from `optim`; parameter names are those of the trained module.

        The objective's own learning-rate factors count where `optim.lr_multipliers` says nothing.
        """
        prefix = "module."
        named = [(name.removeprefix(prefix), value) for name, value in self.objective.named_parameters()]
        scaled = str(self.trainer.precision) == "16-mixed"  # the loss scaler must unscale before clipping
        mine = {**self.optim.lr_multipliers}
        mine |= {key: value for key, value in self.objective.lr_multipliers.items() if key not in mine}
        optimizer, schedule = replace(self.optim, lr_multipliers=mine).build(
            named,
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
        """Clip by the global norm and keep the norm as a figure; DeepSpeed clips inside its engine."""
        if self.trainer.strategy.handles_gradient_accumulation:
            return
        trained = [value for value in self.parameters() if value.grad is not None]
        limit = float(gradient_clip_val) if gradient_clip_val else math.inf
        self._grad_norm = nn.utils.clip_grad_norm_(trained, limit)

    def end_step(self) -> None:
        """Close the optimizer step just taken: its figures, learning rate and gradient norm."""
        step = self.trainer.global_step
        rate = self.optim.lr * self.optim.factor(step - 1, max_steps=self.trainer.max_steps)
        extra: dict[str, Number] = {"lr": rate}
        if self._grad_norm is not None:
            extra["grad_norm"] = self._grad_norm
        self.pool.close(step, extra)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a `Batch` (a frozen dataclass, which Lightning does not move by itself) without waiting."""
        if not isinstance(batch, Batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch.to(device, non_blocking=True)

    def trained_names(self) -> set[str]:
        """Parameters with a gradient, and saved buffers outside the frozen target, by name."""
        names = {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}
        parameters = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        saved = set(super().state_dict())
        return names | {name for name in saved - parameters if not name.startswith("objective.target.")}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Only what is trained: never the frozen target."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        trained = self.trained_names()
        for key in [key for key in state if key.startswith(prefix)]:
            if key[len(prefix) :] not in trained:
                del state[key]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` saves; the frozen target is not expected, everything else is.

        Raises:
            ArtifactError: a trained tensor is missing, has another shape, or is unknown to this module.
        """
        mine = self.state_dict()
        missing, unknown = sorted(set(mine) - set(state_dict)), sorted(set(state_dict) - set(mine))
        shapes = [key for key in set(mine) & set(state_dict) if mine[key].shape != state_dict[key].shape]
        if strict and (missing or unknown or shapes):
            raise ArtifactError(
                f"checkpoint does not fit the module: missing {missing[:4]}, unknown {unknown[:4]}, "
                f"other shape {sorted(shapes)[:4]}; use the method's settings it was trained with"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the step, the facts of the run, what was seen and every rank's random state."""
        checkpoint["longtrain"] = {
            "step": self.trainer.global_step,
            "facts": self.facts,
            "seen": dict(self.seen),
            "rng": gather(self.trainer, random_state()),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the run at the start of the next optimizer step, at the data position that belongs to it.

        Lightning's own loop state is not used: a checkpoint is always taken between two steps, so the step
        count says all there is, also when the same rows are now spread over other ranks.
        """
        saved = checkpoint["longtrain"]
        step = int(saved["step"])
        checkpoint.pop("loops", None)
        epoch = self.trainer.fit_loop.epoch_loop
        epoch.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        epoch._batches_that_stepped = step
        rows = step * self.trainer.accumulate_grad_batches
        total: Any = epoch.batch_progress.total
        total.ready = total.started = total.processed = total.completed = rows
        data = getattr(self.trainer, "datamodule", None)
        if data is not None:
            data.start_batch = rows
        self.seen.update(saved["seen"])
        self._rng = saved["rng"]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After a resume, set the random state that the run had here."""
        if self._rng is not None and len(self._rng) == self.trainer.world_size:
            set_random_state(self._rng[self.trainer.global_rank])
        self._rng = None


def gather(trainer: Any, value: Any) -> list[Any]:
    """A value of every rank, in rank order; needs no device and no other process on one rank."""
    if trainer.world_size == 1:
        return [value]
    found: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, value)
    return found


def random_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, loadable without running pickled code."""
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = state
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
