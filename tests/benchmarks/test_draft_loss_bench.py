"""The draft's loss beside plain torch, on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import draft_loss
from benchmarks.draft_loss import DraftLossSettings
from benchmarks.operators import SMALL_SHAPE
from longtrain.bench.suites import Context
from longtrain.losses.draft import DRAFT_OBJECTIVES


def rows(device: str, dtype: str, **more):
    settings = DraftLossSettings(
        shape=SMALL_SHAPE, dtype=dtype, objectives=DRAFT_OBJECTIVES, compiled=False, repeats=2, **more
    )
    return list(draft_loss.run(settings, Context(torch.device(device))))


def test_gradients_are_those_of_autograd() -> None:
    found = rows("cpu", "float32", tokens=40, draft_vocab_size=48)
    assert [row["objective"] for row in found] == list(DRAFT_OBJECTIVES)
    for row in found:
        assert row["relative_difference"] < 1e-5, row  # sums in another order
        assert row["over_torch"] == row["torch_ms"]["median"] / row["fused_ms"]["median"]


def test_the_suite_writes_a_table(measured, capsys) -> None:
    found = measured("draft_loss", "suite.compiled=false", "suite.repeats=1", "suite.objectives=[kl]")
    assert found[0]["tokens"] == 64 and "| kl | 64 |" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_loss_on_a_gpu() -> None:
    for row in rows("cuda", "bfloat16", tokens=4096, draft_vocab_size=256):
        assert row["relative_difference"] < 0.02, row  # gradients of the head are sums of bf16 products
