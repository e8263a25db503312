"""Ctrl-C: before a job begins nothing was done, and the process may end at once; later it is an exception."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NOTHING_DONE = "\nlongtrain: interrupted before a job began; nothing was done\n"


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, and until `as_usual`, Ctrl-C ends the process with exit code 130.

    An exception in its place could be lost in a library that is being imported, or come out as another one.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored by nohup, say
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def as_usual() -> None:
    """From here on Ctrl-C is an exception again: a job begins, which says what it keeps."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def behind(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what an error comes from: an import that it stops may end in another exception."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(number: int, frame: object) -> None:
    os.write(2, NOTHING_DONE.encode())
    os._exit(130)
