"""Two nodes of two processes, as srun and torchrun start them: one is killed, and the run goes on as it was.

Gloo on this machine stands for the network. With more than two ranks a sum's last bit depends on where in a
bucket a gradient lies, which two ranks do not show. Slow: twelve processes start.
"""

import os
import signal
import socket
import sys
import time

import pytest
import torch

from longtrain.training import checkpoint, table
from tests.helpers import PROCESSES

from . import toy

pytestmark = pytest.mark.slow

NODES, TASKS = 2, 2
RANKS = NODES * TASKS
SETTINGS = (
    f"devices={TASKS}", f"num_nodes={NODES}", 'strategy="ddp"', "per_step=8", "accumulate=2",
    "steps=14", "checkpoint_every_steps=4", "log_every=1", "val_every=5", "sleep=0.01",
)  # fmt: skip


def srun(rank, port):
    """The environment that srun gives the tasks of `train.sbatch`."""
    return {
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "longtrain-train", "SLURM_STEP_ID": "0"},
        **{"SLURM_NTASKS": RANKS, "SLURM_NTASKS_PER_NODE": TASKS, "SLURM_NNODES": NODES},
        **{"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NODEID": rank // TASKS},
        **{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % TASKS, "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
    }


def torchrun(rank, port):
    """The environment that two launchers of torchrun give their processes."""
    return {
        **{"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank % TASKS, "LOCAL_WORLD_SIZE": TASKS},
        **{"GROUP_RANK": rank // TASKS, "TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
    }


def work(environment, file, words):
    """A rank: the toy, whose last words go to a file."""
    os.environ |= {key: str(value) for key, value in environment.items()}
    sys.stderr = file.open("w", buffering=1)
    toy.main(words)


def start(launcher, folder):
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(folder), *SETTINGS]
    files = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    found = [
        PROCESSES.Process(target=work, args=(launcher(rank, port), file, words))
        for rank, file in enumerate(files)
    ]
    for process in found:
        process.start()
    return found, files


def run(launcher, folder):
    processes, files = start(launcher, folder)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * RANKS, [file.read_text() for file in files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(srun, folder)
    return folder


@pytest.mark.parametrize(("launcher", "killed"), [(srun, RANKS - 1), (torchrun, 0)])
def test_a_killed_process_ends_all_with_a_line_and_the_run_goes_on_bit_for_bit(
    whole, tmp_path, launcher, killed
):
    cut = tmp_path / "run"
    processes, files = start(launcher, cut)
    while len(table.read(cut / "metrics.csv")) < 7:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.01)
    os.kill(processes[killed].pid, signal.SIGKILL)
    for process in processes:
        process.join(30)
    others = [rank for rank in range(RANKS) if rank != killed]
    assert [processes[rank].exitcode for rank in others] == [1] * len(others)
    for rank in others:
        (line,) = [line for line in files[rank].read_text().splitlines() if line.startswith("error: ")]
        assert "another rank ended" in line and "last.ckpt (step 4); run the same command again" in line
    run(launcher, cut)
    assert (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
    left, right = (checkpoint.read(folder / "checkpoints/last.ckpt") for folder in (whole, cut))
    for file in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        mine, theirs = left.tensors(file), right.tensors(file)
        assert set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
