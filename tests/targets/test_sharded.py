"""A target split over two ranks gives what a whole one gives (`sharded_worker.py` holds the checks)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sharded_worker
import torch

from longtrain.errors import ConfigError
from longtrain.targets import loading
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import shape_config
from longtrain.targets.sharded import machines

TWO_GPUS = pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def found(request, tmp_path_factory):
    """What each rank found: over gloo in fp32, and over NCCL in bf16."""
    return sharded_worker.run(tmp_path_factory.mktemp("sharded"), request.param)


@pytest.mark.parametrize("check", [check.__name__ for check in sharded_worker.CHECKS])
def test_a_sharded_target_is_the_whole_one(found, check):
    for rank, results in enumerate(found):
        assert results.get(check, "an earlier check failed") == "", f"rank {rank}"


def test_one_process_cannot_share_a_target():
    with pytest.raises(ConfigError, match=r"target\.shard=fsdp2 .* single process; train with trainer=ddp"):
        load_target("tiny", shard="fsdp2")


@pytest.mark.parametrize("names", ["a a b", "a b a b", "a b b a"])
def test_machines_must_have_as_many_ranks_each(names):
    assert machines(["a", "a", "b", "b", "c", "c"]) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match=rf"ranks 0\.\.\d are on {', '.join(names.split())}; start as many"):
        machines(names.split())


def test_a_target_that_fills_the_gpu_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    shape = shape_config("llama33_70b")
    shape.save_pretrained(tmp_path)
    sharded_worker.tokenizer_files(tmp_path)
    monkeypatch.setattr(loading, "device_bytes", lambda device: 141_000_000_000)  # an H200 by its data sheet
    message = r"cpu has 131\.3 GiB, .* 131\.4 GiB for the target's weights, .* target\.shard=fsdp2"
    with pytest.raises(ConfigError, match=message):
        load_target(tmp_path, weights="random", dtype="bfloat16")
    loading.check_room(shape, "x", torch.device("cpu"), itemsize=2, ranks=2)
    monkeypatch.setattr(loading, "device_bytes", lambda device: 24_000_000_000)
    with pytest.raises(ConfigError, match=r"GiB for layers being gathered, .* use machines with more GPUs"):
        loading.check_room(shape, "x", torch.device("cpu"), itemsize=2, ranks=4)


def test_random_weights_need_a_config_and_a_tokenizer_alone(tmp_path):
    shape_config("llama_micro").save_pretrained(tmp_path)
    sharded_worker.tokenizer_files(tmp_path)
    one, same, other = (load_target(tmp_path, weights="random", seed=seed) for seed in (0, 0, 1))
    assert one.info == same.info and one.info.weights_hash != other.info.weights_hash
    assert one.info.name.endswith("(random weights)")
    assert replace(one.info, weights_hash="") == replace(other.info, weights_hash="")
