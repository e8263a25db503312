"""The ranks of a preflight: who they are, how they meet at rank 0, and what an all-reduce between them takes.

They meet at a store of keys and values in rank 0's process. Nothing waits without a deadline, so that a rank
that never comes is told by the name of its node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from longtrain.errors import LongtrainError
from longtrain.provenance import machine_name

POLL_SECONDS = 0.1
MIB = 2**20
GO, STOP = "go", "stop"
LATER_SECONDS = 4.0
"""How much longer the other ranks wait: rank 0 speaks first, since a launcher ends all when one fails."""


@dataclass(frozen=True)
class Rank:
    """One process of a run.

    Args:
        number: from 0 to `world` - 1.
        world: how many there are.
        local: the number among those of its machine.
        per_node: ranks of each machine.
        node: the name of its machine.
        nodes: the names of all machines in the order of their ranks, where Slurm says them.
    """

    number: int = 0
    world: int = 1
    local: int = 0
    per_node: int = 1
    node: str = field(default_factory=machine_name)
    nodes: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Rank:
        """What torchrun or Slurm says of this process; the only rank where neither started it."""
        env = os.environ
        if "WORLD_SIZE" in env:
            world = int(env["WORLD_SIZE"])
            local = int(env.get("LOCAL_RANK", 0))
            return cls(int(env["RANK"]), world, local, int(env.get("LOCAL_WORLD_SIZE", world)))
        if "SLURM_PROCID" not in env:
            return cls()
        world, machines = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", 1))
        local = int(env.get("SLURM_LOCALID", 0))
        return cls(int(env["SLURM_PROCID"]), world, local, -(-world // machines), nodes=_slurm_nodes())

    def places(self, numbers: list[int]) -> str:
        """Ranks in words, by machine: `rank 1 (node b), ranks 2, 3 (node c)`."""
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(number // self.per_node, []).append(number)
        told = []
        for machine, found in groups.items():
            name = self.nodes[machine] if machine < len(self.nodes) else f"number {machine}"
            told.append(f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))} (node {name})")
        return ", ".join(told)


class Meeting:
    """The ranks of a preflight, each with a connection to rank 0.

    Args:
        rank: this one.
        seconds: until when all must have come, and all must be over.

    Raises:
        LongtrainError: rank 0 cannot be reached, or cannot listen.
    """

    def __init__(self, rank: Rank, seconds: float) -> None:
        from torch.distributed import TCPStore

        self.rank, self.seconds = rank, seconds
        self.end = time.monotonic() + seconds
        self._thread: threading.Thread | None = None
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 29500))
        first = rank.number == 0
        try:
            self.store = TCPStore(
                address,
                port,
                is_master=first,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds + LATER_SECONDS),
            )
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:160]
            what = "cannot listen at" if first else "cannot reach rank 0 at"
            raise LongtrainError(
                f"rank {rank.number} on node {rank.node} {what} {address}:{port} ({reason}); check that the "
                "nodes may connect to each other, or set MASTER_ADDR and MASTER_PORT"
            ) from None

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.end - time.monotonic())

    @property
    def stuck(self) -> bool:
        """Whether this rank is still in the all-reduce."""
        return self._thread is not None and self._thread.is_alive()

    def tell(self, what: str, value: Any) -> None:
        """Leave a value of this rank, as JSON, for rank 0."""
        self.store.set(f"{what}/{self.rank.number}", json.dumps(value))

    def collect(self, what: str, *, stop: Callable[[Any], bool] = lambda value: False) -> dict[int, Any]:
        """The values of all ranks; rank 0 asks.

        Args:
            what: as `tell` named them.
            stop: whether a value makes those of other ranks unneeded.

        Raises:
            LongtrainError: some rank left none until the deadline.
        """
        found: dict[int, Any] = {}
        while True:
            for number in sorted(set(range(self.rank.world)) - set(found)):
                if self.store.check([f"{what}/{number}"]):
                    found[number] = json.loads(self.store.get(f"{what}/{number}"))
            if len(found) == self.rank.world or any(map(stop, found.values())):
                return found
            if not self.left:
                missing = sorted(set(range(self.rank.world)) - set(found))
                raise LongtrainError(
                    f"{len(missing)} of {self.rank.world} ranks did not come within {self.seconds:g} s: "
                    f"{self.rank.places(missing)}; see what they wrote and how that node is, or leave it out "
                    "(sbatch --exclude=NODE); timeout_s=SECONDS waits longer"
                )
            time.sleep(POLL_SECONDS)

    def obey(self, key: str) -> None:
        """Wait for rank 0's word.

        Raises:
            SystemExit: with code 1, when it says to stop or is gone; its own line says why.
        """
        try:
            while not self.store.check([key]):
                if time.monotonic() > self.end + LATER_SECONDS:
                    sys.exit(1)
                time.sleep(POLL_SECONDS)
            if self.store.get(key).decode() != GO:
                sys.exit(1)
        except RuntimeError:  # the connection is lost
            sys.exit(1)

    def all_reduce(self, backend: str, device: Any, *, mebibytes: int) -> float:
        """Seconds of an all-reduce of float32 numbers between all ranks: the slowest rank's best of some.

        Every rank calls this; on others than rank 0 what it gives is their own.

        Args:
            backend: nccl or gloo.
            device: this rank's.
            mebibytes: size of what is added up.

        Raises:
            LongtrainError: on rank 0, when a rank got an error or a wrong sum, or some did not end in time.
        """

        def work() -> None:
            try:
                told: dict[str, Any] = {"seconds": self._reduced(backend, device, mebibytes)}
            except Exception as error:
                told = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
            self.tell("reduced", told)

        self._thread = threading.Thread(target=work, daemon=True)  # NCCL may wait for ever
        self._thread.start()
        if self.rank.number:
            self.obey("end")
            return 0.0
        try:
            found = self.collect("reduced", stop=lambda told: "error" in told)
        except LongtrainError as error:
            late = str(error).partition(": ")[2].partition(";")[0]
            raise LongtrainError(
                f"all-reduce over {backend} did not end within {self.seconds:g} s; still in it: {late}; "
                f"{advice(backend)}"
            ) from None
        for number, told in sorted(found.items()):
            if "error" in told:
                raise LongtrainError(
                    f"all-reduce over {backend} failed on {self.rank.places([number])}: {told['error']}; "
                    f"{advice(backend)}"
                )
        return max(told["seconds"] for told in found.values())

    def _reduced(self, backend: str, device: Any, mebibytes: int) -> float:
        import torch
        from torch import distributed

        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            backend,
            store=distributed.PrefixStore("reduce", self.store),
            rank=self.rank.number,
            world_size=self.rank.world,
            timeout=timedelta(seconds=max(1.0, self.left)),
            device_id=device if device.type == "cuda" else None,
        )
        numbers = torch.empty(mebibytes * MIB // 4, device=device)
        best = float("inf")
        for _ in range(4):  # the first one also makes the connections
            numbers.fill_(float(self.rank.number + 1))
            distributed.barrier()
            start = time.perf_counter()
            distributed.all_reduce(numbers)
            want = self.rank.world * (self.rank.world + 1) / 2
            right = bool((numbers == want).all())  # waits for the device
            best = min(best, time.perf_counter() - start)
            if not right:
                raise LongtrainError(f"the sum is {float(numbers[0])}, not {want}")
        distributed.destroy_process_group()
        return best


def advice(backend: str) -> str:
    """What to look at when ranks cannot exchange numbers."""
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    debug = "; NCCL_DEBUG=INFO shows what it tries" if backend == "nccl" else ""
    return f"set {variable} to the network interface between the nodes (ip addr lists them){debug}"


def start_others(world: int) -> tuple[list[subprocess.Popen[bytes]], Rank]:
    """Start the other ranks of this machine as copies of this command, where nobody else starts them.

    Args:
        world: ranks in all.

    Returns:
        Their processes, and this process as their rank 0.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    words = [sys.executable, "-m", "longtrain", *sys.argv[1:]]
    others = [
        subprocess.Popen(words, env={**shared, "RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(1, world)
    ]
    return others, Rank(world=world, per_node=world, nodes=(machine_name(),))


def _slurm_nodes() -> tuple[str, ...]:
    """The nodes of this job, in the order of their ranks; empty where Slurm does not say."""
    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if not re.search(r"\[", listed):
        return tuple(name for name in listed.split(",") if name)
    if shutil.which("scontrol") is None:
        return ()
    try:
        words = ["scontrol", "show", "hostnames", listed]
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())
