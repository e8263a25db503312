"""Runs functions in several processes, any of which may be killed without anyone waiting for it for ever.

Each process has a pipe of its own, and a thread here waits for its answer. If the process is killed, at
whatever moment, the pipe ends, and so does the wait. (`concurrent.futures.ProcessPoolExecutor` has one pipe
for the results of all processes. If one is killed while it writes a result, the executor waits for the rest
of it for ever, because the other processes hold that pipe open.)
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Begin = Callable[["Received", int], None]
"""Called first in each process, with what was handed to it and the number of processes."""

END_SECONDS = 10.0
"""Time for a process without work to end by itself before it is killed."""


class ProcessEnded(Exception):  # noqa: N818 - callers raise a DataError
    """Error of all results that are missing since a process ended; the message says which one, and how."""


class _Process(NamedTuple):
    """A process, and this end of its pipe."""

    process: SpawnProcess
    pipe: Connection


class Processes:
    """Processes that run functions: started one by one as functions come, and ended with this process.

    They ignore SIGINT and SIGTERM, because this process may finish its work first.

    Args:
        value: handed to each process; it can be pickled.
        count: number of processes.
        begin: called first in each process; it can be pickled.
    """

    def __init__(self, value: Any, count: int, begin: Begin) -> None:
        self.count = count
        self._value, self._begin = _Pickled(value), begin
        self._processes: list[_Process] = []
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        """What first went wrong between this process and another; the others are killed then."""
        atexit.register(self.kill)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Return the coming result of a function, which with its arguments and result can be pickled.

        The result raises what the function raises, or `ProcessEnded`.
        """
        if len(self._processes) < self.count:
            self._start()
        return self._threads.submit(self._result, function, *args)

    def kill(self) -> None:
        """Kill the processes; the results that are not ready raise `ProcessEnded`."""
        for one in list(self._processes):
            one.process.kill()

    def close(self) -> None:
        """End the processes once they have done what they have begun; the rest is left undone."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for one in self._processes:
            one.pipe.close()
        for one in self._processes:
            one.process.join(END_SECONDS)
        self.kill()
        self._value.close()
        atexit.unregister(self.kill)

    def _start(self) -> None:
        context = get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._begin, self._value, self.count))
        process.start()
        theirs.close()  # so that the pipe ends with the process
        self._processes.append(_Process(process, mine))
        self._idle.put(self._processes[-1])

    def _result(self, function: Callable[..., T], *args: Any) -> T:
        """Have the next idle process run a function, and wait for the result; called in a thread.

        Raises:
            ProcessEnded: the process, or another one, was killed or ended by itself.
        """
        one = self._idle.get()
        try:
            one.pipe.send((function, args))
            done, result = one.pipe.recv()
        except BaseException as error:  # nothing more can be asked of this process
            raise self._failed(one, error) from None
        finally:
            self._idle.put(one)
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    def _failed(self, one: _Process, error: BaseException) -> BaseException:
        """Kill all processes, and return what to raise: for the first failure and all that follow from it."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                if isinstance(error, EOFError | OSError):
                    one.process.join(END_SECONDS)  # it is ending, and only then is it known how
                    self._failure = ProcessEnded(_ending(one.process))
                self.kill()
            return self._failure


def _ending(process: SpawnProcess) -> str:
    """Say how a process ended."""
    code = process.exitcode
    if code is not None and code >= 0:
        return f"process {process.pid} ended by itself with exit code {code} (its own message is above)"
    number = f" by signal {-code}" if code is not None else ""
    return f"process {process.pid} was killed{number}, probably for lack of memory"


class _Pickled:
    """An object for processes that are being started, pickled into a file that has no name.

    What is handed to such a process directly goes through a pipe, and whoever starts it waits until it has
    read all of it. A tokenizer takes seconds there, since transformers are imported first, and so the
    processes would start one after the other. Of this object only a file descriptor goes through the pipe.
    """

    def __init__(self, value: Any) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - open until the last process has started
        pickle.dump(value, self._file)
        self._file.flush()

    def __reduce__(self) -> tuple[Any, ...]:
        return Received, (DupFd(self._file.fileno()),)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class Received:
    """What was handed to a process, in that process."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor

    def value(self) -> Any:
        """Return the object, once."""
        number = self._descriptor.detach()
        # the offset of the file is shared by all processes, so it is not read but mapped
        with mmap.mmap(number, 0, access=mmap.ACCESS_READ) as pickled:
            os.close(number)
            return pickle.loads(pickled)


def _serve(pipe: Connection, begin: Begin, received: Received, count: int) -> None:
    """Run functions in a process until its pipe ends.

    Signals are left to the parent process. A function goes on if the parent is killed meanwhile; a thread
    ends the process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(received, count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            answer = True, function(*args)
        except BaseException as error:  # raised by the result
            error.add_note(traceback.format_exc())
            answer = False, error
        pipe.send(answer)


def _end_with_parent() -> None:
    """Wait until the parent process has ended, and end this one."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
