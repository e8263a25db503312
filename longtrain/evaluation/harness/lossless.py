"""Compares drafted texts with those of the same cache without the draft: can rounding explain them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.exactness import Difference, Exactness, gap_of, is_strict
from longtrain.evaluation.figures.outcomes import first_difference
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task
from longtrain.log import get_logger
from longtrain.systems import System
from longtrain.systems.system import without_draft

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True)
class LosslessCheck:
    """Compares the texts of a run's drafts with plain decoding.

    Args:
        target: the frozen model; recomputes the logits where texts part.
        suite: that ran.
        systems: that ran.
        sampling: of the run.
    """

    target: Target
    suite: Suite
    systems: Sequence[System]
    sampling: Sampling

    def add_to(self, found: Json, records: Sequence[Record]) -> None:
        """Put into assembled results what the differences are worth, and notes of what is amiss.

        Args:
            found: of `results.assemble`; changed in place.
            records: of all systems.
        """
        texts: dict[tuple[str, str], dict[str, Record]] = {}
        for record in records:
            texts.setdefault((record.system, record.task), {})[record.example] = record
        notes = [*found["notes"], *self.unpaired()]
        tasks = {task.name: task for task in self.suite.tasks if isinstance(task, Task)}
        for system, entry in zip(self.systems, found["systems"], strict=True):
            for one in entry["tasks"]:
                if system.lossless_of is None or not one["exactness"] or one["task"] not in tasks:
                    continue
                place = one["task"]
                pair = [texts.get((name, place), {}) for name in (system.name, system.lossless_of)]
                exact = self._compare(system, tasks[place], pair[0], plain=pair[1])
                said = exact.to_json()
                gaps = [difference["gap"] for difference in said.pop("first")]
                first = [
                    {**known, "gap": gap} for known, gap in zip(one["exactness"]["first"], gaps, strict=True)
                ]
                one["exactness"] = {**one["exactness"], **said, "first": first}
                if exact.violations:
                    notes.append(
                        f"drafted texts of {system.name} in task {place} differ from those without the draft "
                        f"in {len(exact.differences)} of {exact.compared} examples, {exact.violations} of "
                        "them beyond rounding"
                    )
        found["notes"] = notes

    def unpaired(self) -> list[str]:
        """A note for each system whose drafted texts are compared with nothing, and why."""
        names, notes = {system.name for system in self.systems}, []
        for system in self.systems:
            if not system.drafts or system.lossless_of in names:
                continue
            if without_draft(system, self.systems) is not None:
                why = "its drafts are sampled, so that equal texts are not to be expected"
            else:
                why = "no system of this run has the same cache and no draft"
            notes.append(f"texts of {system.name} are not compared with decoding without the draft: {why}")
        return notes

    def _compare(
        self, system: System, task: Task, drafted: Mapping[str, Record], *, plain: Mapping[str, Record]
    ) -> Exactness:
        """As `exactness.compare`, over records."""
        there = {name for name, one in drafted.items() if not one.failed} & {
            name for name, one in plain.items() if not one.failed
        }
        examples = [one for one in task.examples() if one.id in there]
        strict = is_strict(self.target)
        judged = strict or all(self._sampling(task, example).greedy for example in examples)
        differences = []
        for number, example in enumerate(examples):
            a, b = drafted[example.id], plain[example.id]
            place = first_difference(a, b)
            if place is None:
                continue
            gap = self._gap(system, task, example, records=(a, b), place=place) if judged else float("inf")
            differences.append(Difference(number, place["position"], gap))
        if differences:
            log.info(
                "differing texts: system=%s task=%s texts=%d of=%d",
                system.name,
                task.name,
                len(differences),
                len(examples),
            )
        return Exactness(len(examples), tuple(differences), strict, judged)

    def _sampling(self, task: Task, example: Example) -> Sampling:
        heat = task.temperature(example)
        return self.sampling if heat is None else replace(self.sampling, temperature=heat)

    def _gap(
        self, system: System, task: Task, example: Example, *, records: tuple[Record, Record], place: Json
    ) -> float:
        """How far the worse of the two tokens lies below the best logit where two answers part."""
        turn, at = place["turn"] - 1, place["position"]
        answers = [record.turns[turn] if turn < len(record.turns) else None for record in records]
        if any(answer is None or at >= len(answer.tokens) for answer in answers):
            return float("inf")  # one text goes on where the other is over
        a, b = (answer.tokens for answer in answers if answer is not None)
        tokenizer, info = self.target.require_tokenizer(), self.target.info
        prompt = task.encode(
            example, tokenizer, max_tokens=prompt_room(task, self.target), answers=records[1].texts[:turn]
        )
        barred = at < task.min_new_tokens and not task.ignore_eos
        return gap_of(
            self.target,
            prompt.ids,
            a[:at],
            rivals=(a[at], b[at]),
            parts=system.parts,
            barred=(*info.eos_ids, *task.stop_ids(tokenizer)) if barred else (),
            after=prompt.after,
        )
