"""Shows the progress of long work: a bar with the time left on a terminal, else a log line at intervals."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from longtrain.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

EVERY_S = 30.0
"""Seconds between two log lines."""


WINDOW_S = 60.0
"""Seconds over which the speed is averaged to estimate the time left."""
REST_OF_LINE = 56
"""Terminal columns that are reserved for the bar, the counts and the times."""
LEAST_NAME = 12
"""Terminal columns that the task's name has at least."""


class Pace:
    """The speed of work over the last minute, for an estimate of the time left.

    Args:
        done: items done before the measurement began.
        now: the time, seconds.
    """

    def __init__(self, done: int, now: float) -> None:
        self._marks = deque([(now, done)])

    def mark(self, done: int, now: float) -> None:
        """Record the number of items done; at most one mark per second is stored."""
        if len(self._marks) > 1 and now - self._marks[-2][0] < 1:
            self._marks.pop()
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()

    def per_s(self) -> float:
        """Return the items done a second over the last minute; 0 before two marks."""
        (began, first), (now, done) = self._marks[0], self._marks[-1]
        return (done - first) / (now - began) if now > began else 0.0

    def left_s(self, total: int) -> float:
        """Return the seconds left until `total` items are done; NaN if none has been done."""
        (began, first), (now, done) = self._marks[0], self._marks[-1]
        if total <= done:
            return 0.0
        return (total - done) * (now - began) / (done - first) if done > first else float("nan")


def follow(
    stream: Iterable[T], what: str, *, total: int | None = None, unit: str = "documents"
) -> Iterator[T]:
    """Yield the items of a stream and show the progress; without a terminal only if it takes long.

    Args:
        stream: the items.
        what: name of the work, for display.
        total: number of items; None: unknown.
        unit: name of an item, for display.
    """
    with Progress(total, 0, unit, announced=False) as progress:
        for item in stream:
            yield item
            progress.advance(what, 1)


class Progress:
    """Counts finished items and displays the count.

    Args:
        total: number of items, those of earlier runs included; None: unknown.
        done: items that earlier runs have finished.
        unit: name of an item, for display.
        every_s: seconds between two log lines if there is no terminal.
        bar: True shows a bar on a terminal.
        announced: True logs the total at the beginning and at the end; False logs nothing about work that
            takes less than `every_s`.
    """

    def __init__(
        self,
        total: int | None,
        done: int,
        unit: str = "examples",
        *,
        every_s: float = EVERY_S,
        bar: bool = True,
        announced: bool = True,
    ) -> None:
        self.total, self.done, self.before, self.unit = total, done, done, unit
        self.announced = announced
        self.every_s, self.on_terminal = every_s, bar and sys.stderr.isatty()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._last_log = time.monotonic()
        self._pace = Pace(self.done, self._last_log)
        if self.total != 0 and self.on_terminal:
            self._start_bar()
        elif self.total and self.announced:
            before = f" done_before={self.before}" if self.before else ""
            log.info("to do: %s=%d%s", self.unit.replace(" ", "_"), self.total, before)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def add(self, total: int, done: int) -> None:
        """Add items to the total, some of them already done, for another process that reports its part."""
        self.total, self.done, self.before = (self.total or 0) + total, self.done + done, self.before + done
        self._pace = Pace(self.done, time.monotonic())  # items done earlier do not count for the speed
        if self._bar is None and self.total and self.on_terminal:
            self._start_bar()
        elif self._bar is not None:
            self._bar.update(self._task, total=self.total, completed=self.done)

    def advance(self, what: str, done: int) -> None:
        """Count finished items."""
        self.done += done
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=what)
            return
        now = time.monotonic()
        self._pace.mark(self.done, now)
        if now - self._last_log >= self.every_s or (self.announced and self.done == self.total):
            self._last_log, self.announced = now, True
            left = f" of={self.total} left_s={self._pace.left_s(self.total):.0f}" if self.total else ""
            log.info("%s: %s=%d%s", what, self.unit.replace(" ", "_"), self.done, left)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar
        from rich.table import Column

        console = Console(stderr=True)
        room = max(LEAST_NAME, console.width - REST_OF_LINE)  # counts and times are never truncated
        columns = (
            TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, max_width=room, overflow="ellipsis")
            ),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn(self.unit),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )
        self._bar = Bar(*columns, console=console, transient=True, speed_estimate_period=WINDOW_S)
        self._task = self._bar.add_task("starting", total=self.total, completed=self.done)
        self._bar.start()
