"""The typed settings of the training loop, read without torch so that errors are reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longtrain.errors import ConfigError
from longtrain.settings import Count, CountOrZero, NotNegative, check, wrong

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
        self.sequences_of_a_rank(1)  # refuses two settings that contradict each other

    def sequences_of_a_rank(self, ranks: int) -> int:
        """Return the packed sequences of one rank in an optimiser step, which `ranks` share evenly.

        Raises:
            ConfigError: `sequences_per_step` and `accumulate_grad_batches` are both set, or the ranks cannot
                share the sequences evenly.
        """
        together, each = self.sequences_per_step, self.accumulate_grad_batches
        if together is None:
            return each
        if each != 1:
            raise ConfigError(
                f"trainer.sequences_per_step={together} (of all ranks) and "
                f"trainer.accumulate_grad_batches={each} (of each) are both set; give one, the other null "
                "and 1"
            )
        if together % ranks:
            allowed = f"a multiple of {ranks}, the number of ranks (devices x num_nodes)"
            raise wrong("trainer.sequences_per_step", together, allowed)
        return together // ranks

    def resolved(self) -> LoopConfig:
        """Return settings with `auto` accelerator and precision resolved for this machine."""
        import torch

        accelerator, precision = self.accelerator, self.precision
        if accelerator == "auto":
            accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        if precision == "auto":
            precision = "bf16-mixed" if accelerator in ("cuda", "gpu") else "32-true"
        return replace(self, accelerator=accelerator, precision=precision)
