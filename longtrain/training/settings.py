"""The typed settings of the training loop, read without torch so that errors are reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longtrain.settings import Count, CountOrZero, NotNegative, check
from longtrain.training import strategy as strategies

Precision = Literal["auto", "bf16-mixed", "32-true", "16-mixed", "bf16-true", "16-true", "64-true"]


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the training loop (`conf/trainer`).

    Args:
        max_steps: optimiser steps; None: as many as the data's stages have.
        sequences_per_step: packed sequences of all ranks in an optimiser step; replaces
            `accumulate_grad_batches` if set.
        accumulate_grad_batches: packed sequences of one rank in an optimiser step.
        accelerator: cpu, cuda or auto.
        devices: a number, a list of them, or auto.
        num_nodes: number of machines.
        strategy: Lightning's strategy, by name or as an object.
        precision: bf16-mixed keeps the trained weights in fp32; auto: bf16-mixed on CUDA, else 32-true.
        gradient_clip_val: largest global gradient norm; None: do not clip.
        val_every: optimiser steps between validations; 0: never.
        log_every: optimiser steps between readings of the device.
        checkpoint_every_steps: optimiser steps between checkpoints; 0: none but the last.
        checkpoint_every_minutes: minutes between checkpoints; 0: none but the last.
        matmul_precision: the precision of fp32 products on CUDA: highest, high (TF32) or medium.
        deterministic: true, false or warn: torch's deterministic algorithms.
        lightning: further arguments of `lightning.pytorch.Trainer`.
    """

    max_steps: Count | None = None
    sequences_per_step: Count | None = None
    accumulate_grad_batches: Count = 1
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    devices: Any = 1
    num_nodes: Count = 1
    strategy: Any = "auto"
    precision: Precision = "auto"
    gradient_clip_val: float | None = 1.0
    val_every: CountOrZero = 0
    log_every: Count = 10
    checkpoint_every_steps: CountOrZero = 0
    checkpoint_every_minutes: NotNegative = 10.0
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    deterministic: Literal[True, False, "warn"] = False
    lightning: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "trainer")
        self.spread(1)

    def spread(self, ranks: int) -> LoopConfig:
        """Return settings whose `accumulate_grad_batches` lets `ranks` share `sequences_per_step` evenly.

        Raises:
            ConfigError: it does not divide, or both are set.
        """
        if self.sequences_per_step is None:
            return self
        rows = strategies.sequences_of_a_rank(
            self.sequences_per_step, self.accumulate_grad_batches, ranks=ranks
        )
        return replace(self, sequences_per_step=None, accumulate_grad_batches=rows)

    def resolved(self) -> LoopConfig:
        """Return settings with `auto` accelerator and precision resolved for this machine."""
        import torch

        accelerator, precision = self.accelerator, self.precision
        if accelerator == "auto":
            accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        if precision == "auto":
            precision = "bf16-mixed" if accelerator in ("cuda", "gpu") else "32-true"
        return replace(self, accelerator=accelerator, precision=precision)
