"""Parts of an evaluation, each in a process of its own (and on a GPU of its own) on this machine.

A part is `python -m longtrain.jobs.eval SETTINGS PART`; it tells its progress as JSON lines on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from longtrain.errors import LongtrainError
from longtrain.jobs.setup import device_of, plain
from longtrain.log import get_logger
from longtrain.progress import Progress

log = get_logger(__name__)


def run_all(cfg: DictConfig, shards: int, folder: Path) -> None:
    """Start every part here and wait until all are done.

    If one fails the others finish the examples at hand and leave too; the same happens at SIGTERM and Ctrl-C.

    Args:
        cfg: the resolved configuration.
        shards: how many parts there are.
        folder: for the settings that the parts read and for their logs.

    Raises:
        LongtrainError: a part failed, or was stopped; what is done is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / ".settings.yaml"
    OmegaConf.save(OmegaConf.create(plain(cfg)), settings)
    log.info("parts=%d logs=%s", shards, folder / "part-*.log")
    with Progress(0, 0) as bar, stopping() as asked:
        parts = [_Process(settings, folder, number, shards, bar, device_of(cfg)) for number in range(shards)]
        told = False
        try:
            while any(part.running for part in parts):
                stop = asked() or any(part.failed for part in parts)
                if stop and not told:
                    told = True
                    for part in parts:
                        part.stop()
                for part in parts:
                    part.wait(0.2)
        except BaseException:
            for part in parts:
                part.stop()
            for part in parts:
                part.wait(None)
            raise
    settings.unlink(missing_ok=True)
    failed = [part for part in parts if part.failed]
    # the first failure that is not just the answer to being stopped
    failed.sort(key=lambda part: part.asked)
    if failed:
        raise LongtrainError(f"part {failed[0].number} of {shards} failed: {failed[0].why()}")


class _Process:
    """One part in its process."""

    lock = threading.Lock()

    def __init__(
        self, settings: Path, folder: Path, number: int, shards: int, bar: Progress, device: str
    ) -> None:
        self.number, self.bar, self.asked = number, bar, False
        self.error = ""
        self.log = folder / f"part-{number}.log"
        words = [sys.executable, "-m", "longtrain.jobs.eval", str(settings), str(number)]
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env=environment(number, shards, device),
                start_new_session=True,  # Ctrl-C comes here alone, and parts are then stopped in good order
            )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.process.poll() not in (None, 0)

    def stop(self) -> None:
        """Ask it to finish the examples at hand and leave."""
        if self.running:
            self.asked = True
            self.process.terminate()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it ends, or for so many seconds."""
        try:
            self.process.wait(timeout_s)
            self.reader.join()
        except subprocess.TimeoutExpired:
            pass

    def why(self) -> str:
        """Its error, or how it ended and the last line of its log."""
        if self.error:
            return self.error
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        code = self.process.returncode
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{ended}; {lines[-1] if lines else 'it said nothing'} ({self.log})"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                told = json.loads(line)
            except ValueError:
                continue  # some library's own output
            with self.lock:
                if "total" in told:
                    self.bar.add(told["total"], told["before"])
                elif "what" in told:
                    self.bar.advance(told["what"], told["done"])
                elif "error" in told:
                    self.error = told["error"]


def environment(number: int, shards: int, device: str) -> dict[str, str]:
    """A part's environment: one of the GPUs that are visible here, in turn, or its share of the cores."""
    values = dict(os.environ)
    if device.startswith("cuda"):
        gpus = visible_gpus()
        if gpus:
            values["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        values.setdefault("OMP_NUM_THREADS", str(max(1, cores // shards)))
    return values


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


def tell(**values: Any) -> None:
    """Say something to the process that started this part."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
