"""Callbacks that save checkpoints, stop a run at a step boundary after a signal, and show a progress bar.

A signal (SIGTERM, SIGUSR1, Ctrl-C) is acted on only at the end of the current optimiser step, so the grace
time before SIGKILL must cover one whole optimiser step (all its micro-batches, and a validation that is due)
and the writing of one checkpoint. A run killed earlier continues from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longtrain.errors import DataError
from longtrain.log import get_logger
from longtrain.progress import Pace
from longtrain.training import checkpoint, state
from longtrain.training.metrics import Metrics
from longtrain.training.module import TrainModule
from longtrain.training.table import family

log = get_logger(__name__)

LINE_SECONDS = 15.0
"""Least seconds between progress lines without a terminal."""

BAR_WIDTH, BESIDE = 12, 35
"""Columns of the bar, and of everything else on its line except the metrics and the step numbers."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(Exception):  # noqa: N818 - not a failure
    """A signal asked the run to stop; it is saved and can be resumed.

    Args:
        name: the name of the signal.
        step: optimiser steps done and saved.
        path: the checkpoint.
    """

    def __init__(self, name: str, step: int, path: Path) -> None:
        super().__init__(
            f"stopped by {name} after step {step}; saved {path}; run the same command again to resume"
        )
        self.name, self.step, self.path = name, step, path


class Checkpoints(Callback):
    """Saves every so many steps or minutes, at the end, and before stopping on a signal.

    It acts at the start of the first micro-batch of an optimiser step: by then everything of the previous
    step, validation included, is done and written.

    Args:
        folder: the folder of the checkpoints.
        metrics: the metrics, whose table must be on disk first.
        every_steps: optimiser steps between checkpoints; 0: none.
        every_minutes: minutes between checkpoints; 0: none.
    """

    def __init__(
        self, folder: Path, metrics: Metrics, *, every_steps: int = 0, every_minutes: float = 0.0
    ) -> None:
        self.folder, self.metrics = folder, metrics
        self.every_steps, self.every_minutes = every_steps, every_minutes
        self._saved_step = 0
        self._saved_time = time.monotonic()
        self._signal = 0
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install signal handlers that wait for the end of the optimiser step, until training ends."""
        self._saved_step = trainer.global_step
        self._saved_time = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Between two optimiser steps, save if due and stop if a signal asked for it."""
        if batch_idx % trainer.accumulate_grad_batches or trainer.global_step == 0:
            return
        # A signal may reach only some ranks, and clocks differ: all ranks take the maximum and act together.
        number, late = _most(trainer, self._signal, self._is_late())
        due = self.every_steps and trainer.global_step % self.every_steps == 0
        if number or ((due or late) and trainer.global_step != self._saved_step):
            path = self.save(trainer, pl_module)
            if number:
                raise Stopped(signal.Signals(number).name, trainer.global_step, path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to end early: a run is planned as one epoch, so it must not run out of data.

        Raises:
            DataError: the data ended before the last step.
        """
        early = trainer.should_stop or trainer.limit_train_batches != 1.0
        if trainer.global_step < trainer.max_steps and not early:
            raise DataError(
                f"the data ended after step {trainer.global_step} of trainer.max_steps={trainer.max_steps}; "
                f"lengthen data.stages or lower trainer.max_steps"
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step and restore the signal handlers."""
        if trainer.global_step != self._saved_step:
            self.save(trainer, pl_module)
        self._give_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the signal handlers."""
        self._give_back()

    def save(self, trainer: Any, module: TrainModule) -> Path:
        """Write the metrics, then the checkpoint; every rank calls this."""
        self.metrics.publish(trainer, module)
        if trainer.is_global_zero:
            self.metrics.sync()
        path = self.folder / checkpoint.LAST
        if trainer.global_step != self._saved_step:
            started = time.monotonic()
            state.save(trainer, self.folder)
            log.info(
                "saved step=%d path=%s seconds=%.1f", trainer.global_step, path, time.monotonic() - started
            )
            self.metrics.restart_clock()
        self._saved_step, self._saved_time = trainer.global_step, time.monotonic()
        return path

    def _is_late(self) -> bool:
        return bool(self.every_minutes) and time.monotonic() - self._saved_time >= 60 * self.every_minutes

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; a second Ctrl-C stops at once."""
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        again = "; press Ctrl-C again to leave at once without saving" if number == signal.SIGINT else ""
        os.write(2, f"\n{signal.Signals(number).name}: saving at the end of this step{again}\n".encode())

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _most(trainer: Any, number: int, late: bool) -> tuple[int, bool]:
    """Return the largest signal number and lateness over all ranks, so that they act at the same step."""
    if trainer.world_size == 1:
        return number, late
    flags = torch.tensor([number, int(late)], device=trainer.strategy.root_device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    first, second = flags.tolist()
    return int(first), bool(second)


class ProgressBar(Callback):
    """Shows a bar on a terminal, and otherwise (a log file, a batch job) a line from time to time.

    Args:
        enabled: False: neither.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._bar: Progress | None = None
        self._total = self._start = 0
        self._line, self._pace = 0.0, Pace(0, time.monotonic())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock, and open the bar on a terminal."""
        self._total, self._start = trainer.max_steps, trainer.global_step
        self._pace, self._line = Pace(self._start, time.monotonic()), 0.0
        console = Console(stderr=True)
        if self.enabled and trainer.is_global_zero and console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(bar_width=BAR_WIDTH),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[metrics]}"),
                console=console,
                refresh_per_second=2,
            )
            self._bar.add_task("train", total=self._total, completed=self._start, metrics="", left="")
            self._bar.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Advance the bar, without device synchronisation."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Show that validation has started."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], left="validating")
        elif self.enabled and trainer.is_global_zero:
            self._line = time.monotonic()
            log.info("validating step=%d/%d", trainer.global_step, self._total)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Show the progress of validation; in a log only now and then."""
        if not (self.enabled and trainer.is_global_zero):
            return
        done, total = batch_idx + 1, int(sum(trainer.num_val_batches))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], left=f"validating {done}/{total}")
        elif time.monotonic() - self._line >= LINE_SECONDS and done < total:
            self._line = time.monotonic()
            log.info("validating step=%d/%d rows=%d/%d", trainer.global_step, self._total, done, total)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Show the remaining time again."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], left=f"left {self._left(trainer.global_step)}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, so that the message appears below it."""
        self._close()

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show new metrics: a listener of `Metrics`, called on rank 0."""
        left = self._left(step)
        if self._bar is not None:
            room = self._bar.console.width - BAR_WIDTH - 2 * len(str(self._total)) - BESIDE
            shown = short(metrics)
            shown = shown if len(shown) <= room else f"{shown[: max(0, room - 1)]}…"
            self._bar.update(self._bar.task_ids[0], metrics=shown, left=f"left {left}")
        elif self.enabled and (time.monotonic() - self._line >= LINE_SECONDS or step >= self._total):
            self._line = time.monotonic()
            log.info("step=%d/%d %s left=%s", step, self._total, short(metrics, equals="="), left)

    def _left(self, step: int) -> str:
        self._pace.mark(step, time.monotonic())
        seconds = self._pace.left_s(self._total)
        if math.isnan(seconds):
            return "?"
        whole = int(seconds)
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def short(metrics: dict[str, float], *, equals: str = " ") -> str:
    """Format metrics for one line; a family that ends in a number (`acc_1`, `acc_2`) becomes one list.

    Args:
        metrics: the metrics of `metrics.csv`, and the `speed/` ones.
        equals: between a name and its value.
    """
    families: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if name.startswith("train/") and name not in ("train/lr", "train/grad_norm"):
            stem = family(name.removeprefix("train/"))
            families.setdefault(stem, []).append(f"{value:.3f}")
    if "val/loss" in metrics:
        families["val"] = [f"{metrics['val/loss']:.3f}"]
    if "speed/tokens_per_s" in metrics:
        families["tokens/s"] = [f"{metrics['speed/tokens_per_s']:,.0f}".replace(",", "_")]
        families["data_wait"] = [f"{metrics['speed/data_wait_share']:.0%}"]
    return " ".join(f"{name}{equals}{','.join(values)}" for name, values in families.items())
