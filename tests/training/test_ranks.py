"""Ranks wait for the first one without a time limit, and notice when it fails or is gone."""

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from longtrain.errors import ConfigError, LongtrainError, TrainingError
from longtrain.training import ranks
from longtrain.training.loop import build_trainer
from longtrain.training.settings import LoopConfig
from tests.helpers import PROCESSES
from tests.training import toy


def work(rank, port, how, folder):
    """What a rank does: prepare once, then read; what came of it is written to a file."""
    here = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": timedelta(seconds=60)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, **here)

    def broadcast(value):
        box = [value]
        torch.distributed.broadcast_object_list(box)
        return box[0]

    trainer = SimpleNamespace(world_size=2, global_rank=rank, strategy=SimpleNamespace(broadcast=broadcast))

    def prepare():
        made = folder / "made"
        if not made.exists():
            assert rank == 0, "another rank prepared"
            time.sleep(0.3)
            if how == "fails":
                raise OSError("the disk\nis gone")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            made.write_text("rows")
        return made.read_text()

    try:
        if how == "breaks":
            ranks.share(trainer, lambda: 1 / 0)
        (folder / f"rank{rank}").write_text(ranks.first(trainer, prepare))
        torch.distributed.barrier()  # as in training, where the first rank stays
    except LongtrainError as error:
        (folder / f"rank{rank}").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)


@pytest.mark.parametrize("how", ["works", "fails", "breaks", "killed"])
def test_ranks_wait_for_the_first_one(tmp_path, how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [PROCESSES.Process(target=work, args=(rank, port, how, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    second = (tmp_path / "rank1").read_text()
    if how == "works":
        assert [process.exitcode for process in processes] == [0, 0]
        assert (tmp_path / "rank0").read_text() == second == "rows"
    elif how == "fails":
        assert second == "TrainingError: rank 1 leaves, since rank 0 failed: OSError: the disk is gone"
    elif how == "breaks":
        assert second == "TrainingError: rank 0 failed: ZeroDivisionError: division by zero"
    else:
        assert processes[0].exitcode == -signal.SIGKILL
        assert second.startswith("TrainingError: rank 1 waited for rank 0, which ended without a word")
        assert "\n" not in second


def test_one_rank_waits_for_nobody_and_starts_nothing(tmp_path):
    trainer = build_trainer(LoopConfig(accelerator="cpu", precision="32-true"), tmp_path)
    ranks.connect(trainer)
    assert not torch.distributed.is_initialized()
    assert ranks.first(trainer, lambda: 3) == ranks.share(trainer, lambda: 3) == 3
    with pytest.raises(TrainingError, match="full"):
        ranks.share(trainer, lambda: (_ for _ in ()).throw(TrainingError("full")))


def test_slurm_with_another_number_of_tasks_is_one_line(tmp_path, monkeypatch):
    """Lightning compares trainer.devices with what srun started."""
    for key, value in {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(key, value)
    for key, value in {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "4"}.items():
        monkeypatch.setenv(key, value)
    loop = LoopConfig(accelerator="cpu", devices=2, strategy="ddp", precision="32-true")
    with pytest.raises(ConfigError) as error:
        ranks.connect(build_trainer(loop, tmp_path))
    assert "\n" not in str(error.value)


def test_a_rank_that_is_gone_is_told_with_the_checkpoint_to_go_on_from(tmp_path):
    class Lost(toy.Toy):
        def forward(self, batch):
            if self.calls == 12 and self.training:
                raise RuntimeError(
                    "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:25817: Reset by peer. "
                )
            self.calls += self.training
            return super().forward(batch)

    with pytest.raises(
        TrainingError, match=r"another rank ended.*Reset by peer.*last\.ckpt \(step 2\)"
    ) as error:
        toy.train(tmp_path, objective=Lost(toy.Draft()), checkpoint_every_steps=2, val_every=0)
    assert "pair.cc" not in str(error.value) and "\n" not in str(error.value)
