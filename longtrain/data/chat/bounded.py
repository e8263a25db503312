"""Runs chat templates, which are untrusted programs, in a child process with limits of time and memory.

The process is forked at the first call, so it inherits the loaded tokenizer, and it serves all later calls
for the same tokenizer. It uses no GPU and closes this process's files. Jinja's sandbox limits what a template
can reach, but not its time and memory, so both are limited here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from longtrain.errors import first_line

SECONDS = 30.0
"""Time limit of a call; one of a million tokens takes a few seconds."""
MEMORY = 4 * 2**30
"""Bytes that a call may allocate where there is one such process."""

_one_at_a_time = threading.Lock()


class Failed(Exception):  # noqa: N818 - callers raise a DataError
    """Error of a failed call, with the reason in one line."""


class Bounded:
    """Calls a function in a child process, each call within a time and a memory limit.

    Args:
        work: the function. It must return plain values, and sees this process's objects as they were at the
            first call.
        memory: bytes that a call may allocate in addition to the memory of this process.
    """

    def __init__(self, work: Callable[..., Any], memory: int = MEMORY) -> None:
        self.work, self.memory = work, memory
        self._owner, self._child = 0, 0
        self._pipe: Connection | None = None

    def __call__(self, *args: Any, seconds: float = SECONDS, **options: Any) -> Any:
        """Call `work`, and return its result.

        Raises:
            Failed: `work` raised an exception, took too long, or needed too much memory.
        """
        with _one_at_a_time:
            if self._pipe is None or self._owner != os.getpid():
                self._start()
            assert self._pipe is not None
            try:
                self._pipe.send((args, options, seconds))
                if not self._pipe.poll(seconds):
                    raise Failed(f"it was not done after {seconds:g} s")
                done, found = self._pipe.recv()
            except (EOFError, OSError):
                self.close()
                raise Failed("its process ended, perhaps for lack of memory") from None
            except BaseException:  # a late result would be read as that of the next call
                self.close()
                raise
        if not done:
            raise Failed(found)
        return found

    def close(self) -> None:
        """End the process."""
        if self._pipe is None or self._owner != os.getpid():
            return
        self._pipe.close()
        self._pipe = None
        with contextlib.suppress(OSError):
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def _start(self) -> None:
        mine, theirs = Pipe()
        with _quiet_fork():
            child = os.fork()
        if child == 0:
            _serve(theirs, self.work, self.memory)
        theirs.close()
        self._owner, self._child, self._pipe = os.getpid(), child, mine
        atexit.register(self.close)


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Suppress the fork warnings of Python and of tokenizers, whose threads are disabled inside the block."""
    name, before = "TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ[name] = before or "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _serve(pipe: Connection, work: Callable[..., Any], memory: int) -> None:
    """Serve calls until the parent closes the pipe; never returns."""
    try:
        gc.freeze()  # never free inherited objects here, GPU tensors above all
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.closerange(3, pipe.fileno())  # includes files that the parent has locked
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        pages = (
            int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
        )
        if pages:
            limit = pages * resource.getpagesize() + memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            args, options, seconds = pipe.recv()
            signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # if the parent is killed, and cannot end this
            try:
                answer = (True, work(*args, **options))
            except BaseException as error:  # a template can raise anything
                answer = (False, first_line(error))
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(answer)
    except BaseException:  # the other end is gone
        pass
    finally:
        os._exit(0)
