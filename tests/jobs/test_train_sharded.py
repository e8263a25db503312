"""Training on two CPU ranks against a target split over them: the command line, as torchrun runs it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from hydra import compose, initialize_config_dir

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.jobs import train
from longtrain.training import checkpoint, table
from longtrain.training.callbacks import Checkpoints

SETTINGS = (
    "target=tiny",
    "method=longspec",
    "method.window=16",
    "method.guard_every=2",
    "data=text",
    "data.prompt_tokens=[16,48]",
    "data.answers=target",
    "data.answer_tokens=8",
    "data.min_doc_tokens=4",
    "data.val_fraction=0.2",
    "data.val_sequences=2",
    "data.stages=[{fraction: 1.0, sequence_tokens: 96, doc_tokens: 96}]",
    "trainer=cpu",
    "trainer.devices=2",
    "trainer.strategy=ddp",
    "trainer.max_steps=4",
    "trainer.accumulate_grad_batches=2",
    "trainer.val_every=2",
    "trainer.checkpoint_every_steps=2",
    "callbacks.curves=false",
    "quiet=true",
)


def main(rank, folder, port):
    """A rank: train against a whole target; then against a split one, leave after two steps, and go on."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "test",  # by which Lightning knows torchrun
    }
    torch.set_num_threads(1)
    cli.mount()

    def run(name, *settings):
        home = [f"home={folder}/{name}", f"data.text={folder}/texts", f"name={name}"]
        with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
            train.run(RunConfig.from_hydra(compose("train", overrides=[*SETTINGS, *home, *settings])))

    run("whole")
    original = Checkpoints.on_train_batch_start
    Checkpoints.on_train_batch_start = _leave_after(original, step=2)
    with pytest.raises(SystemExit, match="143"):
        run("split", "target.shard=fsdp2")
    Checkpoints.on_train_batch_start = original
    run("split", "target.shard=fsdp2")


def _leave_after(original, *, step):
    def start(self, trainer, module, batch, index):
        if trainer.global_step == step:
            self._signal = 15
        original(self, trainer, module, batch, index)

    return start


@pytest.mark.slow
def test_a_split_target_trains_and_resumes_as_a_whole_one_does(tmp_path):
    words = list("abcdefghij")
    (tmp_path / "texts").mkdir()
    for number in range(12):
        picks = torch.randint(len(words), (120,), generator=torch.Generator().manual_seed(number)).tolist()
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(words[pick] for pick in picks))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(main, (str(tmp_path), port), nprocs=2)
    whole, split = (tmp_path / name / "runs" / name / "train" for name in ("whole", "split"))
    assert (whole / "metrics.csv").read_bytes() == (split / "metrics.csv").read_bytes()
    assert all(0 < float(row["gather_wait_share"]) < 1 for row in table.read(split / "speed.csv"))


STEPS = 16


def command(home, name, *more):
    """The words that train the smallest recipe against a split target, on two CPU ranks."""
    return [
        *(sys.executable, "-m", "longtrain", "train", "+recipe=longspec_tiny", "trainer=cpu", f"home={home}"),
        *(f"name={name}", "trainer.strategy=ddp", "trainer.devices=2", "target.shard=fsdp2"),
        *(
            "data.stages=[{fraction: 1.0, sequence_tokens: 256, doc_tokens: 256}]",
            f"trainer.max_steps={STEPS}",
        ),
        *("trainer.sequences_per_step=2", "trainer.accumulate_grad_batches=1", "trainer.val_every=0"),
        *("trainer.log_every=1", "trainer.checkpoint_every_steps=3", "quiet=true", *more),
    ]


def losses(folder):
    return [float(row["train/loss"]) for row in table.read(folder / "metrics.csv")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_five_moments_it_goes_on_bit_for_bit_and_then_on_one_rank(tmp_path):
    whole, cut, alone = (tmp_path / "runs" / name / "train" for name in ("whole", "cut", "alone"))
    subprocess.run(command(tmp_path, "whole"), check=True)
    for moment in sorted(random.Random(0).sample(range(1, STEPS - 1), 5)):
        process = subprocess.Popen(command(tmp_path, "cut"), start_new_session=True)
        while not (cut / "metrics.csv").exists() or len(losses(cut)) < moment:
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command(tmp_path, "cut"), check=True)
    assert (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
    left, right = (checkpoint.trained_tensors(run / "checkpoints/last.ckpt") for run in (whole, cut))
    assert all(torch.equal(left[name], right[name]) for name in left) and set(left) == set(right)

    kept = whole / "checkpoints/previous.ckpt"
    assert checkpoint.read(kept).about["ranks"] == 2 and checkpoint.read(kept).step < STEPS
    (alone / "checkpoints").mkdir(parents=True)
    shutil.copytree(kept, alone / "checkpoints/last.ckpt")
    shutil.copy(whole / "metrics.csv", alone)
    one = "trainer.strategy=auto", "trainer.devices=1", "target.shard=null"
    subprocess.run(command(tmp_path, "alone", *one), check=True)
    assert losses(alone) == pytest.approx(losses(whole), rel=1e-4)
