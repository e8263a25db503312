"""Reads the run's metrics every `log_every` steps, writes them, and stops a run whose loss is not finite.

`metrics.csv` depends on data and weights alone, one line an optimiser step, so two equal runs have equal
files; `speed.csv` has the timings, one line a reading.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from longtrain.errors import TrainingError
from longtrain.log import get_logger
from longtrain.training import checkpoint
from longtrain.training.module import TrainModule
from longtrain.training.pooling import StepRecord
from longtrain.training.ranks import gather
from longtrain.training.table import Table

log = get_logger(__name__)

Listener = Callable[[int, dict[str, float]], None]


class Metrics(Callback):
    """Writes `metrics.csv` and `speed.csv` of a run.

    Args:
        folder: the run's folder.
        every: optimiser steps between two readings of the device.
        listeners: called on rank 0 with (step, metrics) at a reading: means since the last one, and speed.
    """

    def __init__(self, folder: Path, *, every: int, listeners: Sequence[Listener] = ()) -> None:
        self.folder, self.every, self.listeners = folder, every, listeners
        self.table, self.speed_table = Table(folder / "metrics.csv"), Table(folder / "speed.csv")
        self.newest: dict[str, float] = {}
        self._step = 0
        self._mark = self._idle = time.perf_counter()
        self._waited = 0.0
        self._timed = self._gathered = 0.0

    @property
    def gather_wait_share(self) -> float | None:
        """Share of this session spent waiting for a sharded target; None if the target is not sharded."""
        return self._gathered / self._timed if self._timed else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Remove table lines beyond the checkpoint that the run starts from, and start the clock."""
        self._step = trainer.global_step
        if trainer.is_global_zero:
            self.table.cut(self._step)
            self.speed_table.cut(self._step)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        _gathered_seconds(pl_module)  # discards the time of answers written before training
        self.restart_clock()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add the time since the last micro-batch to the time spent waiting for data."""
        self._waited += time.perf_counter() - self._idle

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the record of an optimiser step that has ended, and read the records when they are due."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            pl_module.end_step()
            if self._step % self.every == 0:
                self.publish(trainer, pl_module)
        self._idle = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Write the training steps first, and exclude validation from the speed."""
        self.publish(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Write one line of validation metrics."""
        pl_module.val_pool.close(trainer.global_step)
        for record in pl_module.val_pool.read(lambda value: gather(trainer, value)):
            metrics = {f"val/{name}": value for name, value in record.metrics.items()}
            pl_module.log_dict(metrics, logger=False, rank_zero_only=True)  # for callbacks that monitor
            if trainer.is_global_zero:
                self._write(trainer, [{"step": record.step, **metrics}])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock again."""
        _gathered_seconds(pl_module)
        self.restart_clock()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read the remaining records."""
        self.publish(trainer, pl_module)

    def publish(self, trainer: Any, module: TrainModule) -> None:
        """Read the closed steps from the device, check and write them, call the listeners. All ranks call it.

        Raises:
            TrainingError: a loss or gradient is not finite; the steps before it are written.
        """
        records = module.pool.read(lambda value: gather(trainer, value))
        if not records:
            return
        seconds = time.perf_counter() - self._mark
        speed = self._speed(trainer, module, records, seconds)
        rows = []
        failed: StepRecord | None = None
        for record in records:
            if not _finite(record, trainer):
                failed = record
                break
            for key in ("tokens", "documents", "rows", "sequence_tokens"):
                module.seen[key] += getattr(record, key)
            metrics = {f"train/{name}": value for name, value in record.metrics.items()}
            rows.append(
                {
                    "step": record.step,
                    **metrics,
                    "seen/labels": module.seen["tokens"],
                    "seen/tokens": module.seen["sequence_tokens"],
                    "seen/documents": module.seen["documents"],
                }
            )
        module.seen["seconds"] += seconds
        if trainer.is_global_zero and rows:
            self._write(trainer, rows)
            self._tell_speed(trainer, records[-1].step, speed)
        self.restart_clock()
        if failed is not None:
            raise TrainingError(_not_finite(failed, self.folder))

    def sync(self) -> None:
        """Flush the table to disk, before a checkpoint that relies on it."""
        self.table.sync()

    def _write(self, trainer: Any, rows: list[dict[str, Any]]) -> None:
        self.table.append(rows)
        self.newest.update(_means(rows))
        for row in rows:
            for logger in trainer.loggers:
                logger.log_metrics(
                    {key: value for key, value in row.items() if key != "step"}, step=row["step"]
                )

    def _speed(
        self, trainer: Any, module: TrainModule, records: list[StepRecord], seconds: float
    ) -> dict[str, float]:
        """Return the speed since the last reading, and the largest memory of a rank; all ranks call it."""
        seconds = max(seconds, 1e-9)
        speed = {
            "tokens_per_s": sum(record.sequence_tokens for record in records) / seconds,
            "seconds_per_step": seconds / len(records),
            "data_wait_share": min(1.0, self._waited / seconds),
            "peak_memory_bytes": max(gather(trainer, peak_memory())),
        }
        if (gathered := _gathered_seconds(module)) is not None:
            self._timed, self._gathered = self._timed + seconds, self._gathered + gathered
            speed["gather_wait_share"] = gathered / seconds
        return speed

    def _tell_speed(self, trainer: Any, step: int, speed: dict[str, float]) -> None:
        self.speed_table.append([{"step": step, **speed}])
        named = {f"speed/{key}": float(value) for key, value in speed.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=step)
        self.newest.update(named)
        for listener in self.listeners:
            listener(step, dict(self.newest))

    def restart_clock(self) -> None:
        """Exclude the time since the last reading (saving, validating) from the speed."""
        self._mark = self._idle = time.perf_counter()
        self._waited = 0.0


def _gathered_seconds(module: TrainModule) -> float | None:
    """Return the seconds waited for a sharded target's layers since the last call; None if not sharded."""
    shards = getattr(getattr(module.objective, "target", None), "shards", None)
    return None if shards is None else shards.seconds_waited()


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric over the lines where it is a number; absent if it never is."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and not math.isnan(value):
                found.setdefault(key, []).append(float(value))
    return {key: sum(values) / len(values) for key, values in found.items()}


def peak_memory() -> int:
    """Return the peak bytes so far: allocated on this rank's GPU, or resident in memory without one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _finite(record: StepRecord, trainer: Any) -> bool:
    """True if the loss is finite, and the gradient norm unless fp16's loss scaler skips such steps."""
    watched = ["loss"] if str(trainer.precision) == "16-mixed" else ["loss", "grad_norm"]
    return all(math.isfinite(record.metrics.get(name, 0.0)) for name in watched)


def _not_finite(record: StepRecord, folder: Path) -> str:
    loss = record.metrics.get("loss", math.nan)
    what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {record.metrics['grad_norm']}"
    names = list(dict.fromkeys(record.offending))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{what} at step {record.step} (documents: {shown or 'not named'}); "
        f"{checkpoint.describe(folder / 'checkpoints')}; try a lower optim.lr or trainer.precision=32-true"
    )
