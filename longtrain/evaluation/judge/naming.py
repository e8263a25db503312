"""What a judged result may be called: every departure from how a benchmark decodes and asks its judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.judge.client import JudgeError
from longtrain.evaluation.judge.marker import UNJUDGED, JudgeMarker, judge_facts
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Summary
from longtrain.evaluation.suites.shared import narrowed
from longtrain.evaluation.task import Task
from longtrain.log import get_logger

log = get_logger(__name__)

Json = dict[str, Any]

PUBLISHED_TOP_K = 50
"""Hugging Face's default, with which the official programs decode, since they set none."""

SAME = frozenset({"chat_template_kwargs"})
"""Request fields that make a judge work as meant (thinking off) and are told beside its name."""


@dataclass(frozen=True)
class Published:
    """A benchmark as it was published.

    Args:
        name: what only a result without departures is called.
        max_new_tokens: most tokens of an answer.
        temperature: the temperature of the judge.
        max_tokens: most tokens of the judge's reply.
        tries: how often the judge is asked for a reply that can be read.
    """

    name: str
    max_new_tokens: int
    temperature: float
    max_tokens: int
    tries: int

    def departures(self, task: Task, marker: JudgeMarker | None, sampling: Sampling) -> list[str]:
        """What differs in the answers' decoding and in the judging; temperatures are the suite's own matter.

        top_k may be off or 50: the paper sets none, and the official program decodes with the default of 50.
        """
        notes = []
        if sampling.top_k == PUBLISHED_TOP_K:
            sampling = replace(sampling, top_k=0)
        if task.max_new_tokens != self.max_new_tokens:
            notes.append(f"answers of up to {task.max_new_tokens} tokens, not {self.max_new_tokens}")
        notes += [
            f"answers drawn with {what}, which the benchmark does not set" for what in narrowed(sampling)
        ]
        if not task.chat:
            notes.append("without chat template")
        return notes if marker is None else notes + self._of_judging(marker)

    def _of_judging(self, marker: JudgeMarker) -> list[str]:
        """What differs in the judge's prompts and settings; its model is told beside the name."""
        notes, end = [], marker.judge
        body = dict(end.body or {})
        if not marker.rubric.prompts.official:
            notes.append("judge prompts that are not the published ones")
        if end.temperature != self.temperature:
            asked = "the server's own" if end.temperature is None else f"{end.temperature:g}"
            notes.append(f"judge's temperature is {asked}, not {self.temperature:g}")
        most = body.pop("max_completion_tokens", None) if end.max_tokens is None else end.max_tokens
        if most != self.max_tokens:
            asked = "any length" if most is None else f"up to {most} tokens"
            notes.append(f"judge's replies of {asked}, not of up to {self.max_tokens} tokens")
        if marker.tries != self.tries:
            notes.append(
                f"judge asked up to {_times(marker.tries)} for a reply with a mark, not {_times(self.tries)}"
            )
        if other := sorted(set(body) - SAME):
            notes.append(f"judge asked with further fields: {', '.join(other)}")
        return notes

    def summary(
        self,
        task: str,
        records: Sequence[Record],
        departures: Sequence[str],
        marker: JudgeMarker | None,
        *,
        score: float | None,
        extra: Json,
        unverified: Sequence[str] = (),
        of: str = "answers",
    ) -> Summary:
        """The summary of one system.

        Args:
            task: the suite's only one.
            records: the records of the system.
            departures: with any of them the result does not have the benchmark's name.
            marker: None where nothing was judged.
            score: the benchmark's figure; None where there is none.
            extra: further values for the result, beside the judge's.
            unverified: notes that leave the name as it is.
            of: what is judged, for the notes.
        """
        wrong = list(departures)
        if cut := sum(record.cut for record in records):
            wrong.append(f"{cut} of {len(records)} prompts shortened to the target's context")
        if marker is None:
            return Summary(
                self._title(wrong), (*wrong, *unverified, UNJUDGED), extra={"judge": None, **extra}
            )
        facts = judge_facts(marker, records)
        if facts["late"]:
            wrong.append(
                f"{facts['late']} {of} of {records[0].system} were had by asking again in a later run, after "
                f"{_replies(marker.tries)} without a mark"
            )
        notes = [*wrong, *unverified, _judged_by(marker)]
        if facts["unjudged"]:
            missing = f"{facts['unjudged']} of {facts['judgements']} {of} of {records[0].system}"
            rest = "there is no score" if score is None else f"the mean over the rest is {score:.2f}"
            notes.append(f"{missing} could not be judged; {rest}")
        tasks = {} if score is None else {task: round(score, 2)}
        return Summary(self._title(wrong), tuple(notes), tasks, tasks.get(task), {"judge": facts, **extra})

    def _title(self, wrong: Sequence[str]) -> str:
        return f"Variant of {self.name}" if wrong else self.name


def check_judged(results: Json) -> None:
    """Warn of what a judge left unjudged.

    Args:
        results: the content of results.json.

    Raises:
        JudgeError: none of a system's answers could be judged.
    """
    nothing = []
    for system in results["systems"]:
        facts = system["extra"].get("judge")
        if not facts or not facts["unjudged"]:
            continue
        reasons = ", ".join(f"{count} x {reason}" for reason, count in facts["unjudged_reasons"].items())
        message = (
            f"judge {facts['model']} left {facts['unjudged']} of {facts['judgements']} judgements of "
            f"{system['name']} without a mark ({reasons}; the first reply: {facts['first_unjudged']!r})"
        )
        if facts["unjudged"] == facts["judgements"]:
            nothing.append(message)
        else:
            log.warning("%s; the same command asks for them again", message)
    if nothing:
        more = f"; likewise {len(nothing) - 1} more systems" if len(nothing) > 1 else ""
        raise JudgeError(
            f"{nothing[0]}{more}. Everything is saved: look at suite.judge.model and its settings; the same "
            "command, or one with a higher suite.judge.tries, asks again"
        )


def _judged_by(marker: JudgeMarker) -> str:
    body = marker.judge.body or {}
    settings = "".join(f", {name}: {body[name]}" for name in sorted(SAME & set(body)))
    return f"judged by {marker.judge.model}{settings}"


def _replies(count: int) -> str:
    return "one reply" if count == 1 else f"{count} replies"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
