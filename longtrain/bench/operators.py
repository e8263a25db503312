"""What measurements of single operators share: random inputs, the hardware's bound, shares of the bandwidth.

An operator is timed on copies of its inputs that take turns, so that no call finds its own in the L2 cache.
Its bound is the longer of two times: its bytes at the data sheet's bandwidth, and its multiplications at the
data sheet's rate. A device without a data sheet is held against the speed of a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtrain.bench import clock
from longtrain.bench.suites import Context, Row
from longtrain.costs import roofline
from longtrain.costs.model import Work

Call = Callable[[int], Any]
"""An operator on another copy of its inputs each time: it is called with 0, 1, 2, ..."""


@dataclass(frozen=True)
class RandomInputs:
    """Makes an operator's inputs.

    Args:
        device: the device that they lie on.
        dtype: the type of their numbers.
        seed: the seed that every cell starts from.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    @classmethod
    def usual(cls, context: Context) -> RandomInputs:
        """Inputs in bfloat16 on CUDA and in float32 elsewhere."""
        return cls(context.device, torch.bfloat16 if context.cuda else torch.float32, context.seed)

    def restart(self) -> None:
        """Give the next cell the numbers that it would have if it came first."""
        torch.manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def bound(moved_bytes: float, flops: float, context: Context) -> Row:
    """Least milliseconds of a call on this device, and what they follow from."""
    gpu = context.gpu
    if gpu is None:
        ms = 1e3 * moved_bytes / clock.copy_bytes_per_s(context.device)
        return {"bound_ms": ms, "bound_by": "a plain copy"}
    least_ms = roofline.bound_ms(Work(flops, moved_bytes), gpu)
    return {"bound_ms": least_ms, "bound_by": f"data sheet of {gpu.name}"}


def bandwidth(moved_bytes: float, ms: float, device: torch.device) -> Row:
    """Bytes a second, and their share of the most that a plain reduction reads on this device."""
    read = clock.read_bytes_per_s(device)
    return {
        "tb_per_s": moved_bytes / ms / 1e9,
        "read_tb_per_s": read / 1e12,
        "of_read": 1e3 * moved_bytes / ms / read,
    }


def distance(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.float() - want.float()).norm() / want.float().norm())
