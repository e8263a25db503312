"""Progress of long work: one bar with the time left on a terminal, else a log line now and then."""

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
"""Between two log lines."""


WINDOW_S = 60.0
"""The time left follows the pace of the last so many seconds."""
REST_OF_LINE = 56
"""Columns of a bar's line that what is done may not take: a short bar, counts and times."""
LEAST_NAME = 12
"""Columns that it has on any terminal."""


class Pace:
    """How fast work goes now, from when how much of it was done.

    Args:
        done: what was done before it began.
        now: the clock, seconds.
    """

    def __init__(self, done: int, now: float) -> None:
        self._marks = deque([(now, done)])

    def mark(self, done: int, now: float) -> None:
        """Note how much is done; marks within a second count as one, so that few are kept."""
        if len(self._marks) > 1 and now - self._marks[-2][0] < 1:
            self._marks.pop()
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()

    def left_s(self, total: int) -> float:
        """Seconds until all is done at this pace; NaN while nothing was done."""
        (began, first), (now, done) = self._marks[0], self._marks[-1]
        if total <= done:
            return 0.0
        return (total - done) * (now - began) / (done - first) if done > first else float("nan")


def follow(
    stream: Iterable[T], what: str, *, total: int | None = None, unit: str = "documents"
) -> Iterator[T]:
    """The same stream, with its progress shown while it is read; without a terminal where that takes long.

    Args:
        stream: what is read.
        what: its name for people.
        total: how many items it has, where that is known.
        unit: what is counted.
    """
    with Progress(total, 0, unit, announced=False) as progress:
        for item in stream:
            yield item
            progress.advance(what, 1)


class Progress:
    """Counts examples.

    Args:
        total: of this run and of earlier runs of it; None: not known.
        done: what earlier runs did.
        unit: what is counted.
        every_s: seconds between two log lines where there is no terminal.
        bar: whether a terminal shows a bar.
        announced: whether the log says before the first is done how many there are, and when all are; else it
            is silent about what takes less than `every_s`.
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
        self._told = time.monotonic()
        self._pace = Pace(self.done, self._told)
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
        """More to be done, and of it done before: another process tells of its part."""
        self.total, self.done, self.before = (self.total or 0) + total, self.done + done, self.before + done
        self._pace = Pace(self.done, time.monotonic())  # what others did before says nothing of the pace
        if self._bar is None and self.total and self.on_terminal:
            self._start_bar()
        elif self._bar is not None:
            self._bar.update(self._task, total=self.total, completed=self.done)

    def advance(self, what: str, done: int) -> None:
        """Count some that are done."""
        self.done += done
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=what)
            return
        now = time.monotonic()
        self._pace.mark(self.done, now)
        if now - self._told >= self.every_s or (self.announced and self.done == self.total):
            self._told, self.announced = now, True
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
        room = max(LEAST_NAME, console.width - REST_OF_LINE)  # counts and times are never cut
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
