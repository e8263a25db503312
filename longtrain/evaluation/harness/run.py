"""Runs units of systems: each is kept in the ledger as it comes, in parts where memory runs out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from longtrain.decoding.sampling import Sampling
from longtrain.errors import LongtrainError
from longtrain.evaluation.harness.answers import Answerer
from longtrain.evaluation.harness.ledger import Ledger
from longtrain.evaluation.harness.plan import Place, Unit, remaining
from longtrain.evaluation.harness.protocol import Protocol
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Advance
from longtrain.evaluation.task import Measured
from longtrain.log import get_logger
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]


class StoppedError(LongtrainError):
    """The run was asked to end; what is done is kept."""


@dataclass(frozen=True)
class Runner:
    """Runs units on a target.

    Args:
        target: the frozen model.
        sampling: of the run; tasks may set the temperature of their own examples.
        advance: told of examples done.
        stopping: asked before every unit whether to leave.
    """

    target: Target
    sampling: Sampling
    advance: Advance = lambda what, done: None
    stopping: Callable[[], bool] = lambda: False

    def run(self, group: Sequence[tuple[System, Ledger]], units: Sequence[Unit]) -> None:
        """Run what the ledgers do not hold yet, every system of the group on a unit before the next unit.

        A batch that does not fit into memory is halved, and so are the later ones of that system; an example
        that does not fit alone becomes a record that says so.

        Raises:
            StoppedError: `stopping` says so; the unit at hand is finished and kept.
            LongtrainError: whatever a task or a system runs into.
        """
        answerer = Answerer(self.target, self.sampling, [system for system, _ in group])
        done = {system.name: places_of(ledger) for system, ledger in group}
        sizes = {system.name: halved_to(ledger) for system, ledger in group}
        for unit in units:
            known: dict[str, Any] = {}
            for system, ledger in group:
                for left in remaining([unit], done[system.name]) if unit.task.serves(system) else ():
                    if self.stopping():
                        raise StoppedError("stopped as asked; what is done is kept")
                    size = self._halved(answerer, system, left, ledger, known=known, size=sizes[system.name])
                    sizes[system.name] = size

    def unit(
        self,
        system: System,
        unit: Unit,
        *,
        answerer: Answerer | None = None,
        known: dict[str, Any] | None = None,
    ) -> Json:
        """Records and times of one unit, as JSON values.

        Args:
            system: the one that is run.
            unit: examples that fit into memory together.
            answerer: of the system's group; None: one for this call alone.
            known: what the full cache gave for the unit's examples (`Measured.measure_against_full`).
        """
        answerer = answerer or Answerer(self.target, self.sampling, [system])
        started = time.perf_counter()
        times: Json = {}
        on_gpu = self.target.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.target.device)
        if isinstance(unit.task, Measured):
            records = answerer.measured(system, unit.task, unit.examples, {} if known is None else known)
        else:
            records, times = answerer.generated(system, unit.task, unit)
        if on_gpu:
            times["peak_bytes"] = torch.cuda.max_memory_allocated(self.target.device)
        times["wall_s"] = time.perf_counter() - started
        times["batch"] = len(unit.examples)
        return {"records": [record.to_json() for record in records], "times": times}

    def _halved(
        self,
        answerer: Answerer,
        system: System,
        unit: Unit,
        ledger: Ledger,
        *,
        known: dict[str, Any],
        size: int | None,
    ) -> int | None:
        """Run a unit, in parts of at most `size`; the size that was found to fit, None if all fits."""
        what = f"{system.name} · {unit.task.name}"
        waiting = unit.split(size or len(unit.examples))
        while waiting:
            part = waiting.pop(0)
            if size is not None:
                known.clear()  # what the whole unit's examples gave is too much to hold beside a part
            payload = self._tried(answerer, system, part, known)
            count = len(part.examples)
            if payload is None and count > 1:
                size = count // 2
                log.warning("memory ran out: %s at a batch of %d; going on with %d", what, count, size)
                waiting = [small for one in (part, *waiting) for small in one.split(size)]
                continue
            if payload is None:
                log.warning("memory ran out: %s at example %s alone", what, part.examples[0].id)
                record = answerer.failed(system, unit.task, part.examples[0])
                payload = {"records": [record.to_json()], "times": {"batch": 1}}
            if size is not None:
                payload["halved_to"] = size
            ledger.put(part.key, payload)
            self.advance(what, count)
        return size

    def _tried(self, answerer: Answerer, system: System, unit: Unit, known: dict[str, Any]) -> Json | None:
        """What a unit gave; None where memory ran out, all that can be freed being freed then."""
        try:
            return self.unit(system, unit, answerer=answerer, known=known)
        except torch.OutOfMemoryError:
            pass  # the error holds the frames, and with them their tensors, until here
        answerer.free()
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def halved_to(ledger: Ledger) -> int | None:
    """The smallest batch that a system's units were cut to where memory ran out; None where it never did."""
    return min((one["halved_to"] for one in ledger.done.values() if "halved_to" in one), default=None)


def ledger_settings(protocol: Protocol, target: Target, system: System) -> Json:
    """What a system's records follow from; a ledger of other settings is refused."""
    return {
        "protocol": protocol.settings,
        "target": target.info.weights_hash,
        "dtype": str(target.dtype),
        "system": system.facts,
    }


def places_of(ledger: Ledger) -> set[Place]:
    """Every (task, example) that is done."""
    return {
        (record["task"], record["example"])
        for payload in ledger.done.values()
        for record in payload["records"]
    }


def records_of(ledger: Ledger) -> dict[Place, Record]:
    """The record of every example that is done; of two, that of the first unit by name."""
    found: dict[Place, Record] = {}
    for key in sorted(ledger.done):
        for values in ledger.done[key]["records"]:
            found.setdefault((values["task"], values["example"]), Record.from_json(values))
    return found


def times_of(ledger: Ledger) -> list[Json]:
    """What each task took, all units together: seconds, tokens and tokens a second, the most bytes held."""
    tasks: dict[str, Json] = {}
    for key in sorted(ledger.done):
        task, times = key.rpartition(":")[0], ledger.done[key]["times"]
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
