"""One evaluation: its work in parts, and the result, made by whoever finds everything done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation.figures.outcomes import examples
from longtrain.evaluation.figures.results import assemble, unsolved
from longtrain.evaluation.figures.statistics import Bootstrap
from longtrain.evaluation.harness import recorded
from longtrain.evaluation.harness.ledger import Ledger
from longtrain.evaluation.harness.lossless import LosslessCheck, is_strict
from longtrain.evaluation.harness.plan import Unit, lanes, part_of, places_for, plan
from longtrain.evaluation.harness.protocol import Protocol, protocol_of
from longtrain.evaluation.harness.run import (
    Runner,
    StoppedError,
    halved_to,
    ledger_settings,
    places_of,
    records_of,
    times_of,
)
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Advance, Suite
from longtrain.evaluation.task import Task
from longtrain.files import lock
from longtrain.journals import unchecked
from longtrain.log import get_logger
from longtrain.settings import wrong
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What an evaluation found.

    Args:
        results: of `results.assemble`; no times, no paths.
        examples: one mapping an example, for `examples.jsonl`.
        timings: what it took.
    """

    results: Json
    examples: list[Json]
    timings: Json


@dataclass
class Session:
    """A suite on a target with its systems.

    Args:
        target: the frozen model.
        suite: what is run.
        systems: the full cache first.
        sampling: of the run.
        folder: of the run's files; ledgers are in `ledger` below it.
        home: whose `baselines.json` holds recorded scores.
        batch: most examples decoded together.
        resamples: of the bootstrap.
        check: whether the full cache's score must be the recorded one.
        record: whether to record it.
    """

    target: Target
    suite: Suite
    systems: Sequence[System]
    sampling: Sampling
    folder: Path
    home: Path
    batch: int = 1
    resamples: int = 2000
    check: bool = True
    record: bool = False
    verdict: Json = field(default_factory=lambda: recorded.unchecked("none"))

    @cached_property
    def protocol(self) -> Protocol:
        """What texts and scores follow from, which the result is pinned to."""
        return protocol_of(self.suite, self.target, self.sampling)

    @cached_property
    def units(self) -> list[Unit]:
        """The whole work of one system, in order."""
        return plan(self.suite, batch=self.batch)

    @cached_property
    def baseline(self) -> Json | None:
        """What is recorded for the full cache; None: nothing, or nothing is asked.

        Raises:
            LongtrainError: it is recorded with another protocol alone.
        """
        if not self.check or self.record or recorded.exempt(self.suite):
            return None
        weights = self.target.info.weights_hash
        return recorded.Baselines.load(self.home).find(self.suite, weights, self.protocol)

    def ledger(self, system: System, *, shard: int = 0, write: bool = False) -> Ledger:
        """What is done of a system."""
        settings = ledger_settings(self.protocol, self.target, system)
        return Ledger(self.folder / "ledger", system.name, settings, shard=shard, write=write)

    def counts(self, *, shard: int = 0, shards: int = 1) -> tuple[int, int]:
        """Examples of a part over all systems: (all, done)."""
        units = part_of(self.units, shard=shard, shards=shards)
        mine = {system.name: places_for(units, system) for system in self.systems}
        done = sum(len(mine[system.name] & places_of(self.ledger(system))) for system in self.systems)
        return sum(map(len, mine.values())), done

    def work(
        self,
        *,
        shard: int = 0,
        shards: int = 1,
        advance: Advance = lambda what, done: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run a part of every system, the full cache first; it is then compared with what is recorded.

        With several parts each sees only its own answers, so that comparison is left to `finish`.

        Raises:
            StoppedError: `stopping` said so.
            ConfigError: a part that is not there, or another run writes it.
            LongtrainError: the full cache's score or protocol is not the recorded one.
        """
        if shards < 1 or not 0 <= shard < shards:
            raise wrong("shard", f"{shard} shards={shards}", "shards from 1, shard from 0 to shards-1")
        _ = self.baseline  # another protocol is refused before anything is run
        runner = Runner(self.target, self.sampling, advance, stopping)
        units = part_of(self.units, shard=shard, shards=shards)
        for group, some in lanes(self.systems, units):
            try:
                with ExitStack() as stack:
                    ledgers = [
                        stack.enter_context(self.ledger(system, shard=shard, write=True)) for system in group
                    ]
                    runner.run(list(zip(group, ledgers, strict=True)), some)
            except StoppedError:
                total, done = self.counts(shard=shard, shards=shards)
                raise StoppedError(
                    f"stopped as asked at {group[0].name}, with {total - done} of {total} examples left in "
                    "this part over all systems; what is done is kept, and the same command goes on from here"
                ) from None
            if group[0] is self.systems[0] and not self.missing(self.systems[:1]):
                self._warn()
                self._compare()

    def missing(self, systems: Sequence[System] | None = None) -> dict[str, int]:
        """Examples that are not done, by system; empty where all is."""
        left = {
            system.name: len(places_for(self.units, system) - places_of(self.ledger(system)))
            for system in systems or self.systems
        }
        return {name: count for name, count in left.items() if count}

    def finish(self) -> Outcome:
        """Figures, examples and times of finished work.

        Raises:
            ConfigError: something is not done yet.
            LongtrainError: the full cache's score is not the recorded one.
        """
        if left := self.missing():
            parts = ", ".join(f"{name}: {count} examples" for name, count in left.items())
            raise ConfigError(
                f"suite {self.suite.name} is not finished ({parts} left in {self.folder}); run the missing "
                "parts with the same settings, or without shard="
            )
        self._compare()
        records = self.records()
        found = self._assemble(self.systems, records)
        found["notes"] = [*self._unverified_notes(), *self._unchecked_notes(), *found["notes"]]
        found["notes"] += [
            *unsolved(self.suite, found),
            *self._lossless.notes(found),
            *self._memory_notes(records),
        ]
        if self.record and not recorded.exempt(self.suite):
            found["baseline"] = self._recorded(found)
        return Outcome(found, self._examples(records), self._timings())

    def finishing(self) -> AbstractContextManager[bool]:
        """Whether this process may write the result inside the block; False while another one does."""
        return lock(self.folder / "ledger" / ".finish.lock")

    def _warn(self) -> None:
        """Say before other systems run that the full cache answers too little for a comparison."""
        if self.suite.solvable:
            full = self.systems[:1]
            for note in unsolved(self.suite, self._assemble(full, self.records(full))):
                log.warning("%s", note)

    def _compare(self) -> None:
        """Set the verdict on the full cache's score."""
        if reason := recorded.exempt(self.suite):
            self.verdict = recorded.unchecked("off", reason=reason)
            return
        if self.record:
            return
        if not self.check:
            self.verdict = recorded.unchecked("off", reason="suite.check_baseline=false")
            return
        full = self.systems[:1]
        own = self.records(full)
        if failed := sum(bool(record.failed) for record in own):
            self.verdict = recorded.unchecked("off", reason=f"memory ran out in {failed} examples")
            return
        average = recorded.average_of(self._assemble(full, own))
        if average is None:
            verdict = recorded.unchecked("no_score")
        elif self.baseline is None:
            verdict = recorded.unchecked("none", average["value"])
        else:
            verdict = recorded.compare(self.suite, self.baseline, average["value"])
        if verdict != self.verdict:
            self.verdict = verdict
            recorded.tell(self.suite, verdict)

    def _recorded(self, found: Json) -> Json:
        average = recorded.average_of(found)
        if average is None:
            return recorded.unchecked("no_score")
        recorded.Baselines.load(self.home).record(
            self.suite, self.target.info.weights_hash, self.protocol, average
        )
        verdict = recorded.unchecked("recorded", average["value"])
        recorded.tell(self.suite, verdict)
        return verdict

    def _unverified_notes(self) -> list[str]:
        """What is to be said of artifacts that ran although they did not verify."""
        used = [one for system in self.systems for one in system.facts.get("artifacts", [])]
        names = dict.fromkeys(one["artifact"] for one in used if one.get("unverified"))
        return [
            f"UNVERIFIED: {name} did not verify and ran with unverified=true, so its figures may not be "
            f"those of what was trained; longtrain inspect {name} says more"
            for name in names
        ]

    def _unchecked_notes(self) -> list[str]:
        """What is to be said of results that were taken from journals without checksums."""
        return [
            f"UNCHECKED: {path} was taken as it is: an earlier longtrain wrote it without checksums, and "
            "nothing shows whether it was edited; remove it to have its examples run again"
            for path in unchecked(self.folder)
        ]

    def _memory_notes(self, records: Sequence[Record]) -> list[str]:
        """What is to be said of systems for which memory ran out."""
        notes = []
        for system in self.systems:
            failed = sum(bool(record.failed) for record in records if record.system == system.name)
            if failed:
                notes.append(
                    f"memory ran out with {system.name} in {failed} examples, which have no score; to run "
                    "them again pass name=OTHER, or remove its ledgers"
                )
            elif size := halved_to(self.ledger(system)):
                notes.append(
                    f"memory ran out with {system.name} at a batch of {self.batch}; the least batch "
                    f"was {size}"
                )
        return notes

    def records(self, systems: Sequence[System] | None = None) -> list[Record]:
        """The records of all examples of the suite that are done, in the suite's order, system by system."""
        full = records_of(self.ledger(self.systems[0]))
        found = []
        for system in systems or self.systems:
            known = full if system is self.systems[0] else records_of(self.ledger(system))
            for task in self.suite.tasks:
                for example in task.examples():
                    record, other = (some.get((task.name, example.id)) for some in (known, full))
                    if record and other and isinstance(task, Task) and not (record.failed or other.failed):
                        record = task.related(record, other, example)
                    found += [record] if record else []
        return found

    def _assemble(self, systems: Sequence[System], records: Sequence[Record]) -> Json:
        target = self.target
        facts = {
            "name": Path(target.info.name).name,  # wherever it was loaded from
            "weights_hash": target.info.weights_hash,
            "dtype": str(target.dtype).removeprefix("torch."),
            "strict": is_strict(target),
            **({"source": target.info.source} if target.info.source else {}),
        }
        return assemble(
            self.suite,
            systems,
            records,
            protocol=self.protocol,
            target=facts,
            draw=Bootstrap(self.sampling.seed, self.resamples),
            baseline=self.verdict,
            judge=self._lossless.judge,
        )

    @property
    def _lossless(self) -> LosslessCheck:
        return LosslessCheck(self.target, self.suite, self.systems, self.sampling)

    def _examples(self, records: Sequence[Record]) -> list[Json]:
        tokenizer, tasks = self.target.require_tokenizer(), self.protocol.settings["tasks"]
        rooms = {
            name: task["max_prompt_tokens"] for name, task in tasks.items() if "max_prompt_tokens" in task
        }
        return list(examples(self.suite, self.systems, records, tokenizer, max_tokens=rooms))

    def _timings(self) -> Json:
        return {
            "device": str(self.target.device),
            "batch": self.batch,
            "systems": [
                {"system": system.name, "tasks": times_of(self.ledger(system))} for system in self.systems
            ],
        }
