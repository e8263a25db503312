"""The checks of test_sharded.py on two GPUs, over NCCL and in bf16."""

from __future__ import annotations

import pytest
import sharded_worker
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return sharded_worker.run(tmp_path_factory.mktemp("sharded"), "cuda")


@pytest.mark.parametrize("check", [check.__name__ for check in sharded_worker.CHECKS])
def test_a_sharded_target_is_the_whole_one(found, check):
    for rank, results in enumerate(found):
        assert results.get(check, "an earlier check failed") == "", f"rank {rank}"
