"""The analytic model: Table 1's asymptotics, the figures' statements, and sums done by hand."""

from __future__ import annotations

import pytest

from longtrain.costs import roofline
from longtrain.costs.hardware import GPUS, gpu_called
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width

LLAMA2_7B = Sizes(32, 32, 32, 128, 4096, 11008, 32000)
LLAMA31_8B = Sizes(32, 32, 8, 128, 4096, 14336, 128256)
A6000 = GPUS["A6000"]


def test_a_step_by_hand() -> None:
    parts = roofline.step(LLAMA31_8B, batch=2, context=1000, rows=3)
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    assert parts.linear.flops == 2 * 6 * weights
    assert parts.attention.flops == 2 * 3 * 4 * 32 * 32 * 128 * 1000
    assert parts.attention.bytes == 2 * (2 * 2 * 32 * 8 * 128 * 1000) + 2 * 2 * 6 * 32 * 32 * 128
    through = 32 * (4 * 4096 + 6144 + 4096 + 2 * 14336 + 14336 + 4096 + 4096 + 4096 - 8192)
    assert parts.linear.bytes == pytest.approx(
        2 * weights + 2 * (6 * through + 6 * (4096 + 128256)), rel=1e-3
    )


def test_decoding_intensity_is_that_of_table_1() -> None:
    """Linear: the batch. Attention: one FLOP a byte and query head, whatever batch and context."""
    for batch in (1, 4, 32):
        for context in (4096, 131072):
            parts = roofline.step(LLAMA2_7B, batch=batch, context=context)
            assert roofline.intensity(parts.attention) == pytest.approx(1, rel=1e-3)
            assert roofline.intensity(parts.linear) == pytest.approx(batch, rel=0.02)
    grouped = roofline.step(LLAMA31_8B, batch=1, context=131072)
    assert roofline.intensity(grouped.attention) == pytest.approx(4, rel=1e-3)


def test_narrow_numbers_carry_scales_and_zeros() -> None:
    assert roofline.stored(128, 16) == 256
    assert 256 / roofline.stored(128, 4) == pytest.approx(3.76, abs=0.01)
    assert 256 / roofline.stored(128, 8) == pytest.approx(1.94, abs=0.01)
    slow = roofline.step(LLAMA31_8B, batch=1, context=65536)
    fast = roofline.step(LLAMA31_8B, batch=1, context=65536, width=Width(weights=4, kv=4))
    assert slow.whole.bytes / fast.whole.bytes == pytest.approx(3.7, abs=0.1)
    assert fast.whole.flops == slow.whole.flops


def test_a_bound_is_the_longer_of_two_times() -> None:
    parts = roofline.step(LLAMA31_8B, batch=1, context=32768)
    found = roofline.metrics(parts, GPUS["H200"])
    assert found["ms"] == pytest.approx(1e3 * parts.whole.bytes / 4.8e12)
    wide = roofline.step(LLAMA31_8B, batch=512, context=1)
    assert roofline.bound_ms(wide.linear, GPUS["H200"]) == pytest.approx(1e3 * wide.linear.flops / 989e12)


def test_boards_of_other_speed_are_not_taken_for_these() -> None:
    assert gpu_called("NVIDIA RTX A6000") is A6000 and gpu_called("NVIDIA A100-SXM4-80GB") is GPUS["A100"]
    assert gpu_called("NVIDIA GH200 480GB") is None and gpu_called("NVIDIA H200 MIG 1g.18gb") is None
    assert gpu_called("NVIDIA A100-SXM4-40GB") is None and gpu_called("NVIDIA H100 PCIe") is None
    assert (
        gpu_called("NVIDIA GeForce RTX 4090") is GPUS["RTX4090"] and gpu_called("NVIDIA L40S") is GPUS["L40S"]
    )
    assert gpu_called("NVIDIA L4") is GPUS["L4"] and gpu_called("NVIDIA GeForce RTX 4090 Laptop GPU") is None
