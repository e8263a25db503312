"""Connects the processes of a run, makes them wait for rank 0, and exchanges values between them.

It relies on these facts of Lightning 2.6: `launcher.launch` starts the processes of this machine unless they
were started already (it then sets LOCAL_RANK, which it reads at the next call), and `setup_environment` does
nothing if the process group exists.
"""

from __future__ import annotations

import atexit
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from longtrain.errors import ConfigError, LongtrainError, TrainingError
from longtrain.log import get_logger
from longtrain.training import checkpoint

log = get_logger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.5
"""Seconds between two checks whether rank 0 is done."""

READ_SECONDS = 20.0
"""Most seconds that rank 0 waits for the others to read why it failed."""

END_SECONDS = 20.0
"""Most seconds that this process waits at its end for processes that it started."""

_turns = itertools.count()
"""Numbers the calls of `first` in this process, which every rank makes in the same order."""


def connect(trainer: Any) -> None:
    """Create the process group, before anything large is loaded; does nothing on one rank, or a second time.

    Under torchrun and Slurm the other processes exist; on a machine with several GPUs Lightning starts
    them here: they run the same command from its beginning and join at this call.

    Raises:
        ConfigError: the number of started ranks differs from the settings, or they cannot connect.
    """
    if trainer.world_size == 1 or torch.distributed.is_initialized():
        return
    launcher = trainer.strategy.launcher
    if launcher is not None and not isinstance(launcher, _SubprocessScriptLauncher):
        raise ConfigError(
            "trainer.strategy starts its ranks inside this process, which longtrain cannot use; "
            "allowed: ddp, or DeepSpeed by trainer=deepspeed_zero2"
        )
    try:
        if launcher is None:
            trainer.strategy.setup_environment()
        else:
            launcher.launch(trainer.strategy.setup_environment, trainer=trainer)
            atexit.register(_end, launcher.procs)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the {trainer.world_size} ranks of trainer.devices x trainer.num_nodes cannot meet: {reason}"
        ) from error


def first(trainer: Any, work: Callable[[], T]) -> T:
    """Run `work` on rank 0, then on the other ranks, which reuse rank 0's files.

    There is no time limit. The other ranks poll the store of the process group, which lives in rank 0's
    process (or in torchrun's), so they notice when that is gone.

    Args:
        trainer: a trainer whose ranks are connected.
        work: the same on every rank.

    Raises:
        TrainingError: on the other ranks, when rank 0 failed or ended.
    """
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return work()
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"longtrain/first/{next(_turns)}"
    if trainer.global_rank == 0:
        try:
            made = work()
        except BaseException as error:
            store.set(key, _in_a_line(error))
            _let_them_read(store, key, trainer.world_size - 1)
            raise
        store.set(key, "")
        return made
    _wait(store, key, trainer.global_rank)
    return work()


def _in_a_line(error: BaseException) -> str:
    """Format an error with its type on one line, for the other ranks."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))


def _wait(store: Any, key: str, rank: int) -> None:
    """Wait until rank 0 has written a key."""
    try:
        while not store.check([key]):
            time.sleep(POLL_SECONDS)
        failed = store.get(key).decode()
        store.add(f"{key}/read", 1)
    except RuntimeError as error:  # torch's error for a lost connection
        raise TrainingError(
            f"rank {rank} waited for rank 0, which ended without a word (killed, or out of memory); see its "
            "own output, then run the same command again"
        ) from error
    if failed:
        raise TrainingError(f"rank {rank} leaves, since rank 0 failed: {failed}")


def _let_them_read(store: Any, key: str, others: int) -> None:
    """Keep the store, which ends with rank 0, until the other ranks have read the error."""
    deadline = time.monotonic() + READ_SECONDS
    while store.add(f"{key}/read", 0) < others and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 5)


def share(trainer: Any, find: Callable[[], T]) -> T:
    """Return the result of `find` on rank 0 to every rank, or raise its error on every rank.

    Args:
        trainer: a trainer whose ranks are connected.
        find: called on rank 0 alone; returns a value that can be sent to the others.

    Raises:
        LongtrainError: the error of `find`.
        TrainingError: on the other ranks, if `find` failed with an error that is not longtrain's own.
    """
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return find()
    found: Any = None
    failed: Exception | None = None
    told: LongtrainError | None = None
    if trainer.global_rank == 0:
        try:
            found = find()
        except LongtrainError as error:
            failed = told = error
        except Exception as error:
            failed = error
            told = TrainingError(f"rank 0 failed: {_in_a_line(error)}")
    found, kind, text = trainer.strategy.broadcast((found, type(told), str(told)))
    if kind is not type(None):
        raise failed or kind(text)
    return found


def gather(trainer: Any, value: Any) -> list[Any]:
    """Return a value of every rank, in rank order; on one rank it needs no process group."""
    if trainer.world_size == 1:
        return [value]
    found: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, value)
    return found


@contextmanager
def told_when_lost(folder: Path) -> Iterator[None]:
    """Context manager that replaces a connection error by a clear message that another rank is gone.

    Args:
        folder: folder of the checkpoints that the run continues from.

    Raises:
        TrainingError: instead of torch's error; gloo's errors have no type of their own.
    """
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, torch.distributed.DistError) and "/gloo/" not in reason:
            raise
        short = reason.rpartition("] ")[2].partition(". ")[0][:120]
        raise TrainingError(
            f"another rank ended, or cannot be reached ({short}); its own output says why; "
            f"{checkpoint.describe(folder)}; run the same command again to go on"
        ) from error


def fix_buckets(trainer: Any) -> None:
    """Give DDP the bucket layout of the whole run before its first step; does nothing for other strategies.

    DDP arranges gradients in buckets anew after its first step, in the order in which they arrived. More than
    two ranks add a number up in an order that depends on its place in the bucket, so a run that resumes
    would differ from an unbroken one in the last bit of its first step. The buckets follow the order of the
    parameters, so the first is full last; gradients of chunked sums arrive at once, where no order is better.
    """
    model = trainer.strategy.model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()


def leave(trainer: Any) -> None:
    """Destroy the process group, once all ranks have reached this.

    A rank that exits without it may hang in NCCL, waiting for ranks that are gone.
    """
    if trainer.world_size > 1 and torch.distributed.is_initialized():
        trainer.strategy.barrier()
        torch.distributed.destroy_process_group()


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """At the end of this process, wait for the processes that it started, and kill those that hang."""
    processes = list(started)
    started.clear()  # Lightning watches this list, and would kill this process for another's exit code
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
