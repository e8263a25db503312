"""Calls that may never end, in a process beside this one: chat templates are programs of whoever wrote them.

The process is forked at the first call, so that it has the tokenizer without loading it, and does all later
calls for the same tokenizer. It touches no GPU and no file of this process. Jinja's sandbox keeps a template
from everything but time and memory; here both have a limit.
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
"""How long a call may take; one of a million tokens takes a few."""
MEMORY = 4 * 2**30
"""Bytes that a call may take beyond what this process has."""

_one_at_a_time = threading.Lock()


class Failed(Exception):  # noqa: N818 - it is told of as a DataError
    """The call failed; the text says how, in one line."""


class Bounded:
    """Does calls of one function in a process beside this one, each within a time and a memory limit.

    Args:
        work: what is called; it gives back plain values. What it holds is that of the moment of the first
            call.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work
        self._owner, self._child = 0, 0
        self._pipe: Connection | None = None

    def __call__(self, *args: Any, seconds: float = SECONDS, **options: Any) -> Any:
        """What `work` gives back.

        Raises:
            Failed: it raised something, took too long, or needed too much memory.
        """
        with _one_at_a_time:
            if self._pipe is None or self._owner != os.getpid():
                self._start()
            assert self._pipe is not None
            try:
                self._pipe.send((args, options))
                if not self._pipe.poll(seconds):
                    raise Failed(f"it was not done after {seconds:g} s")
                done, found = self._pipe.recv()
            except (EOFError, OSError):
                self.close()
                raise Failed("its process ended, perhaps for lack of memory") from None
            except BaseException:  # an answer that nobody waits for would be taken for that of the next call
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
            _serve(theirs, self.work)
        theirs.close()
        self._owner, self._child, self._pipe = os.getpid(), child, mine
        atexit.register(self.close)


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Without the warnings of tokenizers, which is told to use no threads, and of Python."""
    name, before = "TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ[name] = before or "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _serve(pipe: Connection, work: Callable[..., Any]) -> None:
    """Do calls until the other end is gone; never comes back."""
    try:
        gc.freeze()  # nothing of the other process is freed here, tensors on a GPU above all
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.closerange(3, pipe.fileno())  # locks of the other process among them
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        pages = (
            int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
        )
        if pages:
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            args, options = pipe.recv()
            try:
                answer = (True, work(*args, **options))
            except BaseException as error:  # a template can fail in any way there is
                answer = (False, first_line(error))
            pipe.send(answer)
    except BaseException:  # the other end is gone
        pass
    finally:
        os._exit(0)
