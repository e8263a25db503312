"""Parts of an evaluation, each in a process of its own (and on a GPU of its own) on this machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from longtrain.errors import LongtrainError
from longtrain.jobs.setup import device_of, plain
from longtrain.log import get_logger
from longtrain.progress import Progress

log = get_logger(__name__)

Tell = Callable[[Mapping[str, Any]], None]
"""Says to the process that started a part what it has to do (`total`, `before`), or did (`what`, `done`)."""
Work = Callable[[DictConfig, int, Tell, Callable[[], bool]], None]
"""Does a part: (configuration, its number, what it tells, whether it is to leave)."""


def run_all(work: Work, cfg: DictConfig, shards: int, folder: Path) -> None:
    """Start every part here and wait until all are done.

    If one fails the others finish the examples at hand and leave too; the same happens at SIGTERM and Ctrl-C.

    Args:
        work: what each part does; a function that another process can import.
        cfg: the resolved configuration.
        shards: how many parts there are.
        folder: for the logs of the parts.

    Raises:
        LongtrainError: a part failed, or was stopped; what is done is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log.info("parts=%d logs=%s", shards, folder / "part-*.log")
    with Progress(0, 0) as bar, stopping() as asked:
        parts = [_Part(work, cfg, number, shards, folder) for number in range(shards)]
        try:
            while running := {part.told: part for part in parts if part.running}:
                if asked() or any(part.failed for part in parts):
                    _stop(parts)
                for told in wait(list(running), timeout=0.2):
                    running[told].listen(bar)  # type: ignore[index]
        except BaseException:
            _stop(parts)
            for part in parts:
                part.process.join()
            raise
    # the first failure that is not just the answer to being stopped
    failed = sorted((part for part in parts if part.failed), key=lambda part: part.asked)
    if failed:
        raise LongtrainError(f"part {failed[0].number} of {shards} failed: {failed[0].why()}")


class _Part:
    """One part in its process, which tells its progress through a pipe."""

    def __init__(self, work: Work, cfg: DictConfig, number: int, shards: int, folder: Path) -> None:
        self.number, self.running, self.asked, self.error = number, True, False, ""
        self.log = folder / f"part-{number}.log"
        fresh = multiprocessing.get_context("spawn")
        self.told, tell = fresh.Pipe(duplex=False)
        self.process = fresh.Process(target=_begin, args=(work, plain(cfg), number, tell, self.log))
        with environment(number, shards, device_of(cfg)):
            self.process.start()
        tell.close()  # so that the pipe ends with the process

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return not self.running and self.process.exitcode != 0

    def stop(self) -> None:
        """Ask it to finish the examples at hand and leave."""
        if self.running and not self.asked:
            self.asked = True
            self.process.terminate()

    def listen(self, bar: Progress) -> None:
        """Take what it tells next, or that it is over."""
        try:
            told = self.told.recv()
        except EOFError:
            self.process.join()
            self.running = False
            return
        if "total" in told:
            bar.add(told["total"], told["before"])
        elif "what" in told:
            bar.advance(told["what"], told["done"])
        else:
            self.error = told["error"]

    def why(self) -> str:
        """Its error, or how it ended and the last line of its log."""
        if self.error:
            return self.error
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        code = self.process.exitcode or 0
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{ended}; {lines[-1] if lines else 'it said nothing'} ({self.log})"


def _begin(work: Work, values: Mapping[str, Any], number: int, told: Connection, path: Path) -> None:
    """What the process of a part does: its output goes into its log, an error is told."""
    os.setsid()  # Ctrl-C comes to the first process alone, and parts are then stopped in good order
    with path.open("wb") as stream:
        for place in (1, 2):
            os.dup2(stream.fileno(), place)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    cfg = OmegaConf.create(dict(values))
    try:
        with stopping() as asked:
            work(cfg, number, told.send, asked)
    except LongtrainError as error:
        told.send({"error": str(error)})
        log.error("%s", error)
        sys.exit(1)


def _stop(parts: list[_Part]) -> None:
    for part in parts:
        part.stop()


@contextmanager
def environment(number: int, shards: int, device: str) -> Iterator[None]:
    """Inside, a process starts with one of the visible GPUs, in turn, or with its share of the cores."""
    before = dict(os.environ)
    if device.startswith("cuda"):
        if gpus := visible_gpus():
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // shards)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def visible_gpus() -> list[str]:
    """Names of the GPUs that CUDA shows to this process."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM does not end the process: the function given says that it came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def take(number: int, frame: object) -> None:
        came.append(number)
        log.info("signal=SIGTERM the examples at hand are finished first")

    before = signal.signal(signal.SIGTERM, take)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
