"""DeepSpeed itself, on two CPU ranks over gloo: ZeRO-1 and 2 train as one process does, save, and go on.

Lightning's strategy refuses a CPU; the toy leaves that out, and the rest is what runs on GPUs.
"""

import os
import random
import shutil
import signal
import socket
import time

import pytest
import torch

from longtrain.errors import ConfigError
from longtrain.training import checkpoint, table
from longtrain.training import strategy as strategies
from longtrain.training.loop import build_trainer
from longtrain.training.settings import LoopConfig
from tests.helpers import PROCESSES

from . import toy

ZERO = "accumulate=2", "devices=2"
COMMON = "steps=8", "checkpoint_every_steps=3", "gradient_clip_val=0.05", "val_every=4"


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(ranks, folder, *words):
    where = port()
    words = ["noise=false", *COMMON, *words]
    found = [PROCESSES.Process(target=toy.rank, args=(n, where, [str(folder), *words])) for n in range(ranks)]
    for process in found:
        process.start()
    return found


def run(ranks, folder, *words):
    processes = start(ranks, folder, *words)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks


def lines(folder):
    """Steps that the run has told so far."""
    return len(table.read(folder / "metrics.csv"))


def metrics(folder):
    return [
        {key: float(value) for key, value in row.items() if value}
        for row in table.read(folder / "metrics.csv")
    ]


def alike(folder, other):
    """Figures equal up to the order of fp32 sums."""
    rows, others = metrics(folder), metrics(other)
    assert len(rows) == len(others) == 10
    for row, known in zip(rows, others, strict=True):
        assert row == {key: pytest.approx(value, rel=2e-5) for key, value in known.items()}


def tensors(folder):
    saved = checkpoint.read(folder / "checkpoints/last.ckpt")
    return {
        file: dict(saved.tensors(file)) for file in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)
    }, saved.about["state"]["schedule"]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same run in one process, with AdamW's own state."""
    pytest.importorskip("deepspeed")
    os.environ["DS_ACCELERATOR"] = "cpu"
    PROCESSES.set_forkserver_preload(["torch", "lightning.pytorch", "rich.progress", "deepspeed"])
    folder = tmp_path_factory.mktemp("one") / "run"
    run(1, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_trains_as_one_process_with_accumulation_and_clipping(one, tmp_path, stage):
    """Loss, gradient norm and weights; a gradient twice divided by 2 would not be clipped as much."""
    run(2, tmp_path / "zero", *ZERO, f'zero={{"stage": {stage}}}')
    alike(tmp_path / "zero", one)
    assert all(row["train/grad_norm"] > 0.05 for row in metrics(one) if "train/grad_norm" in row)
    (mine, schedule), (theirs, other) = tensors(tmp_path / "zero"), tensors(one)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert schedule == other


@pytest.mark.slow
def test_a_run_goes_on_under_zero_and_under_zero_on_one_process(one, tmp_path):
    """One process -> ZeRO-2 on two; ZeRO-2 on two -> one process; the figures stay those of the whole run."""
    for name in ("there", "back"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    shutil.copytree(one / "checkpoints/previous.ckpt", tmp_path / "there/checkpoints/last.ckpt")
    shutil.copy(one / "metrics.csv", tmp_path / "there")
    run(2, tmp_path / "there", *ZERO, 'zero={"stage": 2}', "checkpoint_every_steps=1")
    alike(tmp_path / "there", one)
    shutil.copytree(tmp_path / "there/checkpoints/previous.ckpt", tmp_path / "back/checkpoints/last.ckpt")
    shutil.copy(tmp_path / "there/metrics.csv", tmp_path / "back")
    assert checkpoint.read(tmp_path / "back/checkpoints/last.ckpt").about["ranks"] == 2
    run(1, tmp_path / "back")
    alike(tmp_path / "back", one)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["false", "true"])
def test_zero_killed_five_times_and_resumed_is_the_same_run_bit_for_bit(one, tmp_path, offload):
    words = *ZERO, f'zero={{"stage": 2, "offload_optimizer": {offload}}}', "noise=true"
    run(2, tmp_path / "whole", *words)
    for moment in sorted(random.Random(offload).sample(range(1, 8), 5)):
        processes = start(2, tmp_path / "cut", *words, "sleep=0.05", "log_every=1")
        while not (tmp_path / "cut/metrics.csv").exists() or lines(tmp_path / "cut") < moment:
            assert processes[0].is_alive()
            time.sleep(0.01)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        last = checkpoint.find(tmp_path / "cut/checkpoints", "auto")
        assert (0 if last is None else checkpoint.read(last).step) in (0, 3, 6)
    run(2, tmp_path / "cut", *words)
    assert (tmp_path / "whole/metrics.csv").read_bytes() == (tmp_path / "cut/metrics.csv").read_bytes()
    (mine, schedule), (theirs, other) = tensors(tmp_path / "cut"), tensors(tmp_path / "whole")
    assert schedule == other
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["deepspeed", "deepspeed_stage_3"])
def test_other_ways_to_ask_for_deepspeed_are_refused_with_what_is_allowed(tmp_path, strategy):
    with pytest.raises(ConfigError, match=r"trainer=deepspeed_zero2; .*target.shard=fsdp2"):
        build_trainer(LoopConfig(strategy=strategy), tmp_path)


def test_stage_and_precision_are_checked_before_anything_is_loaded():
    mapping = {"_target_": "lightning.pytorch.strategies.DeepSpeedStrategy", "stage": 3}
    with pytest.raises(ConfigError, match=r"stage 3 cannot train here; allowed: trainer=deepspeed_zero1"):
        strategies.check(mapping)
    with pytest.raises(ConfigError, match=r"precision=16-mixed with DeepSpeed; allowed: bf16-mixed, 32-true"):
        strategies.check({**mapping, "stage": 2}, precision="16-mixed")


@pytest.mark.parametrize("strategy", ["fsdp", {"_target_": "lightning.pytorch.strategies.FSDPStrategy"}])
def test_a_strategy_that_splits_the_module_is_refused_with_the_one_that_splits_the_target(strategy):
    with pytest.raises(ConfigError, match=r"would split the trained module.* target\.shard=fsdp2"):
        strategies.check(strategy)
