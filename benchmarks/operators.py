"""What measurements of single operators share: random inputs, the hardware's bound, shares of the bandwidth.

An operator is timed on copies of its inputs that take turns, so that no call finds its own in the L2 cache.
Its bound is the longer of two times: its bytes at the data sheet's bandwidth, and its multiplications at the
data sheet's rate. A device without a data sheet is held against the speed of a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from longtrain.bench import clock
from longtrain.bench.suites import Auto, Context, Row
from longtrain.costs import roofline
from longtrain.costs.model import Work

Call = Callable[[int], Any]
"""An operator on another copy of its inputs each time: it is called with 0, 1, 2, ..."""

SMALL_SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""A model for a CPU: features in groups of 64 and more, heads that the quantised cache serves."""
Shape = Annotated[str | dict[str, Any], Auto("llama31_8b", SMALL_SHAPE)]
"""The model whose operators are measured: a published name, or the keys of a `config.json`."""


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


def replayed(call: Call, device: torch.device, *, copies: int, repeats: int) -> dict[str, float]:
    """Spread of the milliseconds of an operator on copies of its inputs that take turns (`clock.replayed`).

    Args:
        call: the operator.
        device: where it runs.
        copies: how many copies there are.
        repeats: replays counted.
    """
    return clock.replayed(lambda i: call(i % copies), device, calls=max(4, copies), repeats=repeats)


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
