"""Runs the parts of a job on this machine, each in a process of its own (and on a GPU of its own)."""

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

from longtrain.errors import LongtrainError
from longtrain.log import get_logger
from longtrain.progress import Progress

log = get_logger(__name__)

Tell = Callable[[Mapping[str, Any]], None]
"""Callback by which a part reports its work (`total`, `before`) and progress (`what`, `done`) to the parent
process.
"""
Work = Callable[[int, Tell, Callable[[], bool]], None]
"""Runs a part: (its number, progress callback, function that returns True to stop)."""


def run_all(work: Work, shards: int, *, logs: Path, device: str) -> None:
    """Start every part on this machine and wait until all are done.

    If one fails, the others finish their current examples and stop; the same happens at SIGTERM and Ctrl-C.

    Args:
        work: runs a part; it is pickled for the part's process.
        shards: the number of parts.
        logs: the folder for the logs of the parts.
        device: the torch device that the parts run on; on CUDA each gets a GPU of its own.

    Raises:
        LongtrainError: a part failed, or was stopped; finished examples stay in the journal.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log.info("parts=%d logs=%s", shards, logs / "part-*.log")
    with Progress(0, 0) as bar, stopping() as asked:
        parts = []
        for number in range(shards):
            with environment(number, shards, device):
                parts.append(_Part(work, number, logs))
        try:
            while running := {part.messages: part for part in parts if part.running}:
                if asked() or any(part.failed for part in parts):
                    _stop(parts)
                for pipe in wait(list(running), timeout=0.2):
                    running[pipe].listen(bar)  # type: ignore[index]
        except BaseException:
            _stop(parts)
            for part in parts:
                part.process.join()
            raise
    # the first failure that is not a consequence of being stopped
    failed = sorted((part for part in parts if part.failed), key=lambda part: part.asked)
    if failed:
        raise LongtrainError(f"part {failed[0].number} of {shards} failed: {failed[0].why()}")


class _Part:
    """One part in its own process, which reports progress through a pipe."""

    def __init__(self, work: Work, number: int, logs: Path) -> None:
        self.number, self.running, self.asked, self.error = number, True, False, ""
        self.log = logs / f"part-{number}.log"
        fresh = multiprocessing.get_context("spawn")
        self.messages, sender = fresh.Pipe(duplex=False)
        self.process = fresh.Process(target=_begin, args=(work, number, sender, self.log))
        self.process.start()
        sender.close()  # our copy, so that the pipe ends with the process

    @property
    def failed(self) -> bool:
        """True if the process ended with an error."""
        return not self.running and self.process.exitcode != 0

    def stop(self) -> None:
        """Ask the process to finish its current examples and exit."""
        if self.running and not self.asked:
            self.asked = True
            self.process.terminate()

    def listen(self, bar: Progress) -> None:
        """Read the next progress message, or note the end of the process."""
        try:
            message = self.messages.recv()
        except EOFError:
            self.process.join()
            self.running = False
            return
        if "total" in message:
            bar.add(message["total"], message["before"])
        elif "what" in message:
            bar.advance(message["what"], message["done"])
        else:
            self.error = message["error"]

    def why(self) -> str:
        """Its error message, or its exit status and the last line of its log."""
        if self.error:
            return self.error
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        code = self.process.exitcode or 0
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{ended}; {lines[-1] if lines else 'no output'} ({self.log})"


def _begin(work: Work, number: int, pipe: Connection, path: Path) -> None:
    """Entry point of a part's process: redirects its output to the log and reports errors through
    the pipe.
    """
    os.setsid()  # Ctrl-C then reaches only the parent process, which stops the parts in order
    with path.open("wb") as stream:
        for place in (1, 2):
            os.dup2(stream.fileno(), place)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        with stopping() as asked:
            work(number, pipe.send, asked)
    except LongtrainError as error:
        pipe.send({"error": str(error)})
        log.error("%s", error)
        sys.exit(1)


def _stop(parts: list[_Part]) -> None:
    for part in parts:
        part.stop()


@contextmanager
def environment(number: int, shards: int, device: str) -> Iterator[None]:
    """Context manager: processes started inside get one of the visible GPUs, in turn, or their share of the
    cores.
    """
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
    """Identifiers of the GPUs that CUDA shows to this process."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Context manager: SIGTERM does not end the process; the yielded function returns True once
    it has come.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def take(number: int, frame: object) -> None:
        came.append(number)
        log.info("signal=SIGTERM current examples are finished first")

    before = signal.signal(signal.SIGTERM, take)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
