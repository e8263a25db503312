"""One evaluation: runs its work in parts; the process that finds all parts done writes the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation.analysis.numbers import repetition_notes
from longtrain.evaluation.analysis.results import assemble
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.harness import recorded
from longtrain.evaluation.harness.lossless import LosslessCheck, is_strict
from longtrain.evaluation.harness.plan import Unit, groups, part_of, places_for, plan
from longtrain.evaluation.harness.protocol import Protocol, protocol_of
from longtrain.evaluation.harness.results_journal import ResultsJournal
from longtrain.evaluation.harness.run import (
    Runner,
    StoppedError,
    halved_to,
    places_of,
    records_of,
    times_of,
)
from longtrain.evaluation.records import Record
from longtrain.evaluation.reporting.examples import examples
from longtrain.evaluation.suite import Advance, Suite
from longtrain.evaluation.task import Task
from longtrain.files import lock
from longtrain.journals import journals_in
from longtrain.log import get_logger
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of an evaluation.

    Args:
        results: the output of `results.assemble`; contains no times or paths.
        examples: one mapping per example, for `examples.jsonl`.
        timings: times and peak memory.
    """

    results: Json
    examples: list[Json]
    timings: Json


@dataclass
class Session:
    """A suite, a target, and the systems to evaluate.

    Args:
        target: the frozen model.
        suite: the suite to run.
        systems: the systems, the full cache first.
        sampling: the run's sampling settings.
        folder: the folder of the run's files; journals are in `journals` below it.
        home: the folder whose `baselines.json` has recorded scores.
        batch: the maximum number of examples decoded together.
        resamples: number of bootstrap resamples.
        check: require that the full cache's score equals the recorded one.
        record: write the full cache's score to the recorded scores.
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
        """The settings that determine answers and scores; their hash is part of the result."""
        return protocol_of(self.suite, self.target, self.sampling)

    @cached_property
    def units(self) -> list[Unit]:
        """All units of one system, in order."""
        return plan(self.suite, batch=self.batch)

    @cached_property
    def baseline(self) -> Json | None:
        """The recorded score of the full cache; None if there is none, or it is not to be checked.

        Raises:
            LongtrainError: it is recorded with other protocols only.
        """
        if not self.check or self.record or recorded.exempt(self.suite):
            return None
        weights = self.target.info.weights_hash
        return recorded.Baselines.load(self.home).find(self.suite, weights, self.protocol)

    def journal(self, system: System, *, shard: int = 0, write: bool = False) -> ResultsJournal:
        """Open the journal of a system's finished units; one of other settings is refused."""
        settings = {
            "protocol": self.protocol.settings,
            "target": self.target.info.weights_hash,
            "dtype": str(self.target.dtype),
            "system": system.facts,
        }
        return ResultsJournal(journals_in(self.folder), system.name, settings, shard=shard, write=write)

    def counts(self, *, shard: int = 0, shards: int = 1) -> tuple[int, int]:
        """Number of examples of a part over all systems: (all, done)."""
        units = part_of(self.units, shard=shard, shards=shards)
        mine = {system.name: places_for(units, system) for system in self.systems}
        done = sum(len(mine[system.name] & places_of(self.journal(system))) for system in self.systems)
        return sum(map(len, mine.values())), done

    def work(
        self,
        *,
        shard: int = 0,
        shards: int = 1,
        advance: Advance = lambda what, done: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run a part of every system, the full cache first, whose score is then compared with the recorded
        one.

        With several parts each has only its own answers, so `finish` does that comparison.

        Raises:
            StoppedError: `stopping` returned True.
            ConfigError: another run writes this part.
            LongtrainError: the full cache's score or protocol is not the recorded one.
        """
        _ = self.baseline  # refuse another protocol before anything is run
        runner = Runner(self.target, self.sampling, advance, stopping)
        units = part_of(self.units, shard=shard, shards=shards)
        for group in groups(self.systems):
            try:
                with ExitStack() as stack:
                    journals = [
                        stack.enter_context(self.journal(system, shard=shard, write=True)) for system in group
                    ]
                    runner.run(list(zip(group, journals, strict=True)), units)
            except StoppedError:
                total, done = self.counts(shard=shard, shards=shards)
                raise StoppedError(
                    f"stopped as asked at {group[0].name}, with {total - done} of {total} examples left in "
                    "this part over all systems; finished examples are kept, and the same command "
                    "continues with the rest"
                ) from None
            if group[0] is self.systems[0] and not self.missing(self.systems[:1]):
                self._warn()
                self._compare()

    def missing(self, systems: Sequence[System] | None = None) -> dict[str, int]:
        """Number of examples that are not done, by system; empty if everything is done."""
        left = {
            system.name: len(places_for(self.units, system) - places_of(self.journal(system)))
            for system in systems or self.systems
        }
        return {name: count for name, count in left.items() if count}

    def finish(self) -> Outcome:
        """Compute the metrics, examples and times of finished work.

        Raises:
            ConfigError: an example is not done yet.
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
        found["notes"] = [*self._unverified_notes(), *found["notes"]]
        found["notes"] += [
            *unsolved(self.suite, found),
            *repetition_notes(found["systems"]),
            *self._lossless.notes(found),
            *self._memory_notes(records),
        ]
        if self.record and not recorded.exempt(self.suite):
            found["baseline"] = self._recorded(found)
        return Outcome(found, self._examples(records), self._timings())

    def finishing(self) -> AbstractContextManager[bool]:
        """A lock: True inside the block if this process may write the result, False if another one does."""
        return lock(journals_in(self.folder) / ".finish.lock")

    def _warn(self) -> None:
        """Warn, before other systems run, if the full cache answers too few examples for a comparison."""
        if self.suite.solvable:
            full = self.systems[:1]
            for note in unsolved(self.suite, self._assemble(full, self.records(full))):
                log.warning("%s", note)

    def _compare(self) -> None:
        """Compare the full cache's score with the recorded one and store the verdict."""
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
            recorded.log_verdict(self.suite, verdict)

    def _recorded(self, found: Json) -> Json:
        average = recorded.average_of(found)
        if average is None:
            return recorded.unchecked("no_score")
        recorded.Baselines.load(self.home).record(
            self.suite, self.target.info.weights_hash, self.protocol, average
        )
        verdict = recorded.unchecked("recorded", average["value"])
        recorded.log_verdict(self.suite, verdict)
        return verdict

    def _unverified_notes(self) -> list[str]:
        """Notes on artifacts that were used although they did not verify."""
        used = [one for system in self.systems for one in system.facts.get("artifacts", [])]
        names = dict.fromkeys(one["artifact"] for one in used if one.get("unverified"))
        return [
            f"UNVERIFIED: {name} did not verify and ran with unverified=true, so its results may not be "
            f"those of the trained module; longtrain inspect {name} has details"
            for name in names
        ]

    def _memory_notes(self, records: Sequence[Record]) -> list[str]:
        """Notes on systems that ran out of memory."""
        notes = []
        for system in self.systems:
            failed = sum(bool(record.failed) for record in records if record.system == system.name)
            if failed:
                notes.append(
                    f"memory ran out with {system.name} in {failed} examples, which have no score; to run "
                    "them again pass name=OTHER, or remove its journals"
                )
            elif size := halved_to(self.journal(system)):
                notes.append(
                    f"memory ran out with {system.name} at a batch of {self.batch}; the smallest batch "
                    f"was {size}"
                )
        return notes

    def records(self, systems: Sequence[System] | None = None) -> list[Record]:
        """The records of all finished examples, in the suite's order, system by system."""
        full = records_of(self.journal(self.systems[0]))
        found = []
        for system in systems or self.systems:
            known = full if system is self.systems[0] else records_of(self.journal(system))
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
            "name": Path(target.info.name).name,  # independent of the path it was loaded from
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
                {"system": system.name, "tasks": times_of(self.journal(system))} for system in self.systems
            ],
        }


def unsolved(suite: Suite, results: Json) -> list[str]:
    """A note for results whose full cache scores below half the maximum, since they cannot separate systems.

    Args:
        suite: the suite that ran; one that is not `solvable` gets no note.
        results: the output of `assemble`, the full cache first.

    Returns: at most one note, which names the kinds of questions, or the tasks, that are below half.
    """
    full, best = results["systems"][0], results["scale"]["maximum"]
    if not suite.solvable or full["kind"] != "full" or best is None:
        return []
    kinds = [(str(one["value"]), one["score"]) for one in full["facets"] if one["facet"] == "task"]
    parts = kinds or [(one["task"], one["score"]) for one in full["tasks"]]
    low = {name: score["value"] for name, score in parts if (score["value"] or 0.0) < best / 2}
    mean = full["average"]["value"] or 0.0
    if not low and mean >= best / 2:
        return []
    named = ", ".join(f"{name} {value or 0.0:.3g}" for name, value in low.items())
    where = f" in {named}" if low else ""
    return [
        f"the full cache scores below half{where} (average {mean:.3g} of {best:.3g}): what other "
        "systems score there separates nothing; take shorter lengths, other tasks or another target"
    ]
