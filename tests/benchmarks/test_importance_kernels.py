"""The importance kernels beside their reference in torch, on a CPU, where both are torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import importance_kernels
from longtrain.bench.suites import Context
from longtrain.costs.model import Sizes
from longtrain.targets.shapes import SHAPES

CPU = Context(torch.device("cpu"))
MICRO = Sizes.of_keys(SHAPES["llama_micro"])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(importance_kernels.measure(CPU, torch.float32, MICRO, ((4, 64),), repeats=2))


def test_kernels_stand_beside_their_reference(rows: list[dict[str, Any]]) -> None:
    assert [row["call"] for row in rows] == list(importance_kernels.PRODUCTS)
    for row in rows:
        assert row["relative_difference"] < 1e-5  # fp32, sums in another order
        assert row["speed"] == pytest.approx(row["torch_ms"]["median"] / row["kernel_ms"]["median"])
        assert row["bound_ms"] > 0


def test_the_bound_counts_what_must_be_read(rows: list[dict[str, Any]]) -> None:
    by_call = {row["call"]: row["bound_bytes"] for row in rows}
    keys = 64 * MICRO.n_kv_heads * MICRO.head_dim * 4
    assert by_call["suffix_lse"] == keys
    assert by_call["importance"] == keys + 64 * MICRO.n_heads * 4
    assert by_call["suffix_attention"] == 2 * keys + 64 * MICRO.n_heads * 4


def test_the_suite_writes_a_table(measured, capsys) -> None:
    rows = measured("importance", "suite.shape=llama_micro", "suite.cells=[[2,32]]", "suite.repeats=2")
    assert [row["keys"] for row in rows] == [32] * 4 and "| 2 | 32 | importance |" in capsys.readouterr().out


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    cuda = Context(torch.device("cuda"))
    for row in importance_kernels.measure(cuda, torch.bfloat16, MICRO, ((32, 1024), (512, 1024)), repeats=5):
        assert row["relative_difference"] < 0.03  # outputs and gradients are bf16, of 8 bits
        assert row["kernel_ms"]["p10"] > 0
