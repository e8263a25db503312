"""What a training run takes on each machine at the least, beside what is free there.

Only what is certain is counted: the target's weights, what is trained with its optimizer, and checkpoints.
What a row's activations take, `longtrain plan` estimates.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longtrain import files
from longtrain.cache.room import free_bytes
from longtrain.costs.disk import GENERATIONS, checkpoint_bytes
from longtrain.costs.hardware import GIB
from longtrain.costs.held import Held, needed, refuse_lack
from longtrain.errors import ConfigError, LongtrainError
from longtrain.jobs.outline import held_of
from longtrain.jobs.preflight_ranks import Rank


@dataclass(frozen=True)
class Room:
    """What is free where a rank runs, bytes; None where nobody says.

    Args:
        gpu: of its GPU.
        host: memory of its machine, within the job's limit; only the first rank of a machine tells it.
        disk: below `run_dir`, with what the run's checkpoints take already, which new ones replace; only the
            first rank of a machine tells it.
    """

    gpu: int | None = None
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Needs:
    """What the run takes at the least.

    Args:
        gpu: what a rank holds on its GPU; None where no GPU is used.
        host: bytes on each machine.
        disk: bytes below `run_dir`.
    """

    gpu: Held | None
    host: int
    disk: int

    def check(self, rooms: list[tuple[str, Room]]) -> None:
        """Compare with what the ranks found.

        Args:
            rooms: the node of each rank and what is free there.

        Raises:
            LongtrainError: the first place where something is too small.
        """
        for node, room in rooms:
            told = (
                ("disk below run_dir", room.disk, self.disk, "free space, or pass home=FOLDER"),
                ("host memory", room.host, self.host, "ask for more (sbatch --mem=SIZE)"),
            )
            for what, free, need, advice in told:
                if free is not None and free < need:
                    raise LongtrainError(
                        f"{what} on node {node}: {free / GIB:.3g} GiB are free, the run needs "
                        f"{need / GIB:.3g} GiB or more; {advice}"
                    )
            if self.gpu is not None and room.gpu is not None:
                where = f"the free part of a GPU on node {node} (nvidia-smi shows who uses the rest)"
                refuse_lack(self.gpu, room.gpu, f"the run does not fit: {where}")

    def words(self, rooms: list[Room]) -> list[str]:
        """Least free bytes of all ranks beside the need, for the last line."""
        gpu = 0.0 if self.gpu is None else needed(self.gpu.bytes)
        found = []
        for name, need in (("gpu", gpu), ("host", self.host), ("disk", self.disk)):
            free = [value for room in rooms if (value := getattr(room, name)) is not None]
            if free:
                found.append(f"{name}={min(free) / GIB:.3g} GiB free ({need / GIB:.3g} needed)")
        return found


def needs_of(cfg: DictConfig, rank: Rank) -> Needs:
    """The least that training takes, from shapes alone.

    Raises:
        ConfigError: no method is chosen, the target's shape is not at hand, or a strategy that cannot be.
    """
    import torch

    what, trained = held_of(cfg, devices=rank.per_node, nodes=rank.world // rank.per_node)
    on_gpu = str(cfg.trainer.accelerator) != "cpu" and torch.cuda.is_available()
    host = what.offloaded + (0 if on_gpu else what.bytes)
    disk = GENERATIONS * checkpoint_bytes(trained)
    return Needs(what if on_gpu else None, host * rank.per_node, disk)


def room_here(cfg: DictConfig, device: Any, *, first: bool) -> Room:
    """What is free where this process runs.

    Args:
        cfg: the resolved configuration.
        device: the rank's.
        first: whether it is the first rank of its machine, which looks at memory and disk too.

    Raises:
        ConfigError: there is no such GPU.
    """
    import torch

    gpu = None
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"torch sees {torch.cuda.device_count()} CUDA devices, and this rank is to use number "
                f"{device.index}; ask for as many GPUs as ranks (sbatch --gpus-per-node), or pass trainer=cpu"
            )
        gpu = torch.cuda.mem_get_info(device)[0]
    if not first:
        return Room(gpu)
    run_dir = Path(cfg.run_dir)
    there = sum(file.stat().st_size for file in run_dir.glob("train/checkpoints/*.ckpt/*"))
    return Room(gpu, host=host_bytes(), disk=files.free_bytes(run_dir) + there)


def host_bytes() -> int | None:
    """Memory that a process may take: what the machine has free, within the limits of its job and cgroup."""
    import torch

    limits = [free_bytes(torch.device("cpu"))]
    megabytes = os.environ.get("SLURM_MEM_PER_NODE", "")
    limits.append(int(megabytes) * 2**20 if megabytes.isdecimal() else None)  # 0: all that the node has
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(filter(None, limits), default=None)
