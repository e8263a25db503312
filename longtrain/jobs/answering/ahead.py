"""Reads an iterator ahead in a thread, in its order, while the GPU works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")
POLL_S = 0.1
"""Seconds after which the thread looks whether it is still needed."""


class Ahead(Generic[T]):
    """An iterator whose next items a thread reads; leaving the context ends it.

    The first item is read at once, in this thread: processes that the source starts are then forked before
    there are threads.

    Args:
        source: the items. An error of it is raised where its item would have come.
        most: most items that are read ahead.
        closing: set as the context is left; a source that searches long for its next item ends then.
    """

    def __init__(self, source: Iterator[T], most: int, closing: threading.Event) -> None:
        self._source, self._read = source, Queue[tuple[list[T], BaseException | None]](most)
        self._ended, self._closing = False, closing
        first, error = self._item()
        self._read.put((first, error))
        self._thread = threading.Thread(target=self._fill, name="prompts", daemon=True)
        if first:
            self._thread.start()

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        while True:  # a wait without a limit could not be interrupted
            try:
                item, error = self._read.get(timeout=POLL_S)
                break
            except Empty:
                continue
        if item:
            return item[0]
        self._ended = True
        raise StopIteration if error is None else error

    def _item(self) -> tuple[list[T], BaseException | None]:
        """Return the next item, or none at the end or with the error that ends the source."""
        try:
            return [next(self._source)], None
        except StopIteration:
            return [], None
        except BaseException as error:  # raised by whoever takes the item
            return [], error

    def _fill(self) -> None:
        while not self._closing.is_set():
            found = self._item()
            while not self._closing.is_set():
                try:
                    self._read.put(found, timeout=POLL_S)
                    break
                except Full:
                    continue
            if not found[0]:
                return
