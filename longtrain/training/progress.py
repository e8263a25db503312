"""The bar people watch: loss, the objective's figures, tokens per second, data wait, time left."""

from __future__ import annotations

import re
import time
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longtrain.log import get_logger

log = get_logger(__name__)

LINE_SECONDS = 15.0
"""Without a terminal: at most one line in so many seconds."""


class ProgressBar(Callback):
    """A bar on a terminal, a line from time to time elsewhere (a log file, a batch job).

    Args:
        enabled: False: neither.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._bar: Progress | None = None
        self._total = self._start = 0
        self._started = self._line = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bar."""
        self._total, self._start = trainer.max_steps, trainer.global_step
        self._started, self._line = time.monotonic(), 0.0
        console = Console(stderr=True)
        if self.enabled and trainer.is_global_zero and console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=console,
                refresh_per_second=2,
            )
            self._bar.add_task("train", total=self._total, completed=self._start, figures="", left="")
            self._bar.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Move the bar; costs nothing on the device."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, so that the message stands below it."""
        self._close()

    def show(self, step: int, figures: dict[str, float]) -> None:
        """Take new figures: a listener of `Metrics`, called on rank 0."""
        left = self._left(step)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], figures=short(figures), left=f"left {left}")
        elif self.enabled and (time.monotonic() - self._line >= LINE_SECONDS or step >= self._total):
            self._line = time.monotonic()
            log.info("step=%d/%d %s left=%s", step, self._total, short(figures, equals="="), left)

    def _left(self, step: int) -> str:
        done = max(1, step - self._start)
        seconds = int((time.monotonic() - self._started) / done * max(0, self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def short(figures: dict[str, float], *, equals: str = " ") -> str:
    """Figures in a few words; a family that ends in a number (`acc_1`, `acc_2`) becomes one list.

    Args:
        figures: as in `metrics.csv`, with `speed/` ones.
        equals: between a name and its value.
    """
    families: dict[str, list[str]] = {}
    for name, value in figures.items():
        if name.startswith("train/") and name not in ("train/lr", "train/grad_norm"):
            stem = re.sub(r"[_/@.-]?(depth|d)?[_/]?\d+$", "", name.removeprefix("train/"))
            families.setdefault(stem, []).append(f"{value:.3f}")
    if "val/loss" in figures:
        families["val"] = [f"{figures['val/loss']:.3f}"]
    if "speed/tokens_per_s" in figures:
        families["tokens/s"] = [f"{figures['speed/tokens_per_s']:,.0f}".replace(",", "_")]
        families["data_wait"] = [f"{figures['speed/data_wait_share']:.0%}"]
    return " ".join(f"{name}{equals}{','.join(values)}" for name, values in families.items())
