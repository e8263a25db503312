"""Ctrl-C handling: it ends the process at once until a job begins, and raises KeyboardInterrupt
afterwards.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NOTHING_DONE = "\nlongtrain: interrupted before a job began; nothing was done\n"


@contextmanager
def at_once() -> Iterator[None]:
    """Context manager: until `as_usual` is called, Ctrl-C ends the process with exit code 130.

    An exception could be swallowed or replaced by a library that is being imported.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored (nohup)
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def as_usual() -> None:
    """Restore KeyboardInterrupt for Ctrl-C, so that a job can report what it keeps."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def behind(error: BaseException | None) -> bool:
    """True if Ctrl-C caused an error: an interrupted import may raise another exception."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(number: int, frame: object) -> None:
    os.write(2, NOTHING_DONE.encode())
    os._exit(130)
