"""Runs units with systems: each result goes to the journal as it is finished; batches are split if memory
runs out, and joined again once it suffices.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from longtrain.decoding.sampling import Sampling
from longtrain.errors import LongtrainError
from longtrain.evaluation.harness.answers import Answerer
from longtrain.evaluation.harness.plan import Place, Unit, remaining
from longtrain.evaluation.harness.results_journal import ResultsJournal
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Advance
from longtrain.evaluation.task import Measured
from longtrain.log import get_logger
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]
WELL = 3
"""Batches that must have fitted before a larger one is tried again."""


class StoppedError(LongtrainError):
    """The run was asked to stop; finished units are in the journal."""


@dataclass
class Room:
    """The batch of one system that fits into memory: halved where memory runs out, and doubled again later,
    since another process may have held the memory for a moment.

    Args:
        asked: the batch that was asked for.
        size: the batch that is run now.
        well: batches that fitted since it changed, smaller ones at the end of a unit included.
        raised: the task in which the batch was doubled to this size; empty: it was not.
        refused: task -> a batch that ran out again after it was doubled, which is not tried there any more.
    """

    asked: int
    size: int
    well: int = 0
    raised: str = ""
    refused: dict[str, int] = field(default_factory=dict)

    def too_large(self, task: str, count: int) -> None:
        """Halve a batch of `count`, which did not fit."""
        if self.raised == task:
            self.refused[task] = count
        self.size, self.well, self.raised = count // 2, 0, ""

    def fitted(self, task: str) -> None:
        """Double the batch if enough of them fitted and a larger one may be tried in this task."""
        self.well += 1
        larger = min(2 * self.size, self.asked)
        if self.well >= WELL and self.size < larger < self.refused.get(task, larger + 1):
            self.size, self.well, self.raised = larger, 0, task


@dataclass(frozen=True)
class Runner:
    """Runs units on a target.

    Args:
        target: the frozen model.
        sampling: the run's settings; a task may have its own temperature.
        advance: called with the number of examples done.
        stopping: called before every unit; True stops the run.
    """

    target: Target
    sampling: Sampling
    advance: Advance = lambda what, done: None
    stopping: Callable[[], bool] = lambda: False

    def run(self, group: Sequence[tuple[System, ResultsJournal]], units: Sequence[Unit]) -> None:
        """Run the units that are not in the journals yet, every system of the group on a unit before the next
        unit.

        A batch that does not fit into memory is halved, and so are the next ones of that system (`Room`); an
        example that does not fit alone gets a record with the failure.

        Raises:
            StoppedError: `stopping` returned True; the current unit is finished and recorded.
            LongtrainError: an error of a task or a system.
        """
        answerer = Answerer(self.target, self.sampling, [system for system, _ in group])
        done = {system.name: places_of(journal) for system, journal in group}
        asked = max((len(unit.examples) for unit in units), default=1)
        rooms = {system.name: Room(asked, halved_to(journal) or asked) for system, journal in group}
        for unit in units:
            for system, journal in group:
                for left in remaining([unit], done[system.name]) if unit.task.serves(system) else ():
                    if self.stopping():
                        raise StoppedError("stopped as asked; finished examples are kept")
                    self._fitting(answerer, system, left, journal, rooms[system.name])

    def unit(self, system: System, unit: Unit, *, answerer: Answerer | None = None) -> Json:
        """Run one unit; returns its records and times as JSON values.

        Args:
            system: the system to run.
            unit: examples that fit into memory together.
            answerer: the answerer of the system's group; None: a temporary one.
        """
        answerer = answerer or Answerer(self.target, self.sampling, [system])
        started = time.perf_counter()
        times: Json = {}
        on_gpu = self.target.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.target.device)
        if isinstance(unit.task, Measured):
            records = answerer.measured(system, unit.task, unit.examples)
        else:
            records, times = answerer.generated(system, unit.task, unit)
        if on_gpu:
            times["peak_bytes"] = torch.cuda.max_memory_allocated(self.target.device)
        times["wall_s"] = time.perf_counter() - started
        times["batch"] = len(unit.examples)
        return {"records": [record.to_json() for record in records], "times": times}

    def _fitting(
        self, answerer: Answerer, system: System, unit: Unit, journal: ResultsJournal, room: Room
    ) -> None:
        """Run a unit in parts for which there is room."""
        task, left = unit.task.name, unit.examples
        what = f"{system.name} · {task}"
        while left:
            part = replace(unit, examples=left[: room.size])
            count, payload = len(part.examples), self._tried(answerer, system, part)
            fits = payload is not None
            if payload is None and count > 1:
                room.too_large(task, count)
                log.warning("memory ran out: %s at a batch of %d; going on with %d", what, count, room.size)
                continue
            if payload is None:
                log.warning("memory ran out: %s at example %s alone", what, part.examples[0].id)
                record = answerer.failed(system, unit.task, part.examples[0])
                payload = {"records": [record.to_json()], "times": {"batch": 1}}
            if room.size < room.asked:
                payload["halved_to"] = room.size
            if fits:
                room.fitted(task)
            journal.put(part.key, payload)
            self.advance(what, count)
            left = left[count:]

    def _tried(self, answerer: Answerer, system: System, unit: Unit) -> Json | None:
        """The result of a unit, or None if memory ran out (after freeing what can be freed)."""
        try:
            return self.unit(system, unit, answerer=answerer)
        except torch.OutOfMemoryError:
            pass  # the error references the frames and their tensors until here
        answerer.free()
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def halved_to(journal: ResultsJournal) -> int | None:
    """The smallest batch that a system's units were split to when memory ran out, or None if it never did."""
    return min((one["halved_to"] for one in journal.done.values() if "halved_to" in one), default=None)


def places_of(journal: ResultsJournal) -> set[Place]:
    """(task, example) for every example that is done."""
    return {
        (record["task"], record["example"])
        for payload in journal.done.values()
        for record in payload["records"]
    }


def records_of(journal: ResultsJournal) -> dict[Place, Record]:
    """The record of every example that is done; of duplicates, the one from the first unit by name."""
    found: dict[Place, Record] = {}
    for key in sorted(journal.done):
        for values in journal.done[key]["records"]:
            found.setdefault((values["task"], values["example"]), Record.from_json(values))
    return found


def times_of(journal: ResultsJournal) -> list[Json]:
    """Costs of each task over all units: seconds, tokens, tokens per second, peak memory."""
    tasks: dict[str, Json] = {}
    for key in sorted(journal.done):
        task, times = key.rpartition(":")[0], journal.done[key]["times"]
        row = tasks.setdefault(task, {"task": task, "units": 0, "examples": 0})
        row["units"] += 1
        row["examples"] += times["batch"]
        for name in ("prefill_s", "decode_s", "output_tokens", "wall_s", "target_forwards"):
            if name in times:
                row[name] = row.get(name, 0) + times[name]
        for name in ("cache_bytes", "draft_bytes", "peak_bytes"):
            if name in times:
                row[name] = max(row.get(name, 0), times[name])
    for row in tasks.values():
        if row.get("decode_s"):
            row["tokens_per_s"] = row["output_tokens"] / (row["prefill_s"] + row["decode_s"])
    return list(tasks.values())
