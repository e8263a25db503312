"""Shared parts of operator benchmarks: random inputs, the hardware's bound, and shares of the bandwidth.

An operator is timed on rotating copies of its inputs, so that they are not in the L2 cache. Its bound is the
longer of two times: its bytes at the data sheet's bandwidth, and its operations at the data sheet's rate. A
device without a data sheet is compared with the speed of a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks import replay
from longtrain.bench.suites import Auto, Context, Row
from longtrain.costs import roofline
from longtrain.costs.model import Work

Call = Callable[[int], Any]
"""Function that runs an operator; it is called with 0, 1, 2, ..., to select a copy of its inputs."""

SMALL_SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""A small model for CPUs, with sizes that the quantised kernels and the quantised cache support."""
Shape = Annotated[str | dict[str, Any], Auto("llama31_8b", SMALL_SHAPE)]
"""Shape of the model whose operators are measured: a published name, or the keys of a `config.json`."""


@dataclass(frozen=True)
class RandomInputs:
    """Generates an operator's random inputs.

    Args:
        device: device of the inputs.
        dtype: dtype of the inputs.
        seed: seed at the start of every cell.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    @classmethod
    def usual(cls, context: Context) -> RandomInputs:
        """Return inputs in bfloat16 on CUDA and in float32 elsewhere."""
        return cls(context.device, torch.bfloat16 if context.cuda else torch.float32, context.seed)

    def restart(self) -> None:
        """Reset the generator, so that the inputs of a cell do not depend on earlier cells."""
        torch.manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed numbers."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def replayed(call: Call, device: torch.device, *, copies: int, repeats: int) -> dict[str, float]:
    """Return the spread of an operator's milliseconds on rotating copies of its inputs (`replay.replayed`).

    Args:
        call: the operator.
        device: the device it runs on.
        copies: number of copies.
        repeats: counted replays.
    """
    return replay.replayed(lambda i: call(i % copies), device, calls=max(4, copies), repeats=repeats)


def bound(moved_bytes: float, flops: float, context: Context) -> Row:
    """Return the lower bound of a call's milliseconds on this device, and what it is derived from."""
    gpu = context.gpu
    if gpu is None:
        ms = 1e3 * moved_bytes / replay.copy_bytes_per_s(context.device)
        return {"bound_ms": ms, "bound_by": "a plain copy"}
    least_ms = roofline.bound_ms(Work(flops, moved_bytes), gpu)
    return {"bound_ms": least_ms, "bound_by": f"data sheet of {gpu.name}"}


def bandwidth(moved_bytes: float, ms: float, device: torch.device) -> Row:
    """Return bytes per second, and their share of a plain reduction's on this device."""
    read = replay.read_bytes_per_s(device)
    return {
        "tb_per_s": moved_bytes / ms / 1e9,
        "read_tb_per_s": read / 1e12,
        "of_read": 1e3 * moved_bytes / ms / read,
    }


def distance(got: Tensor, outputs: Tensor) -> float:
    """Return the norm of the difference, relative to the expected outputs' norm."""
    return float((got.float() - outputs.float()).norm() / outputs.float().norm())
