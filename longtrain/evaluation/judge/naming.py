"""What judged results say of their judge: departures from how a benchmark asks one, and who judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.evaluation.judge.client import JudgeError
from longtrain.evaluation.judge.marker import UNJUDGED, JudgeMarker, judge_facts
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Summary
from longtrain.log import get_logger

log = get_logger(__name__)

Json = dict[str, Any]

SAME = frozenset({"chat_template_kwargs"})
"""Request fields that make a judge work as meant (thinking off) and are told beside its name."""


def judging(marker: JudgeMarker | None) -> Json:
    """How a judge is asked, as the keys of `Published.settings`; its model is told beside the title."""
    if marker is None:
        return {}
    end = marker.judge
    most = (end.body or {}).get("max_completion_tokens") if end.max_tokens is None else end.max_tokens
    return {"judge.temperature": end.temperature, "judge.max_tokens": most, "judge.tries": marker.tries}


def own_judging(marker: JudgeMarker | None) -> list[str]:
    """Departures of a judge's prompts and of further fields of its requests."""
    if marker is None:
        return []
    fields = set(marker.judge.body or {}) - SAME
    if marker.judge.max_tokens is None:
        fields -= {"max_completion_tokens"}
    found = [] if marker.rubric.prompts.official else ["judge prompts that are not the published ones"]
    return [*found, *([f"judge asked with further fields: {', '.join(sorted(fields))}"] if fields else [])]


def judged_summary(
    task: str,
    records: Sequence[Record],
    marker: JudgeMarker | None,
    *,
    score: float | None,
    extra: Mapping[str, Any],
    of: str,
) -> Summary:
    """The summary of one system.

    Args:
        task: the suite's only one.
        records: the records of the system.
        marker: None where nothing was judged.
        score: the benchmark's figure; None where there is none.
        extra: further values for the result, beside the judge's.
        of: what is judged, for the notes.
    """
    if marker is None:
        return Summary(notes=(UNJUDGED,), extra={"judge": None, **extra})
    facts, late = judge_facts(marker, records), []
    if facts["late"]:
        replies = "one reply" if marker.tries == 1 else f"{marker.tries} replies"
        late.append(
            f"{facts['late']} {of} of {records[0].system} were had by asking again in a later run, after "
            f"{replies} without a mark"
        )
    notes = [_judged_by(marker)]
    if facts["unjudged"]:
        missing = f"{facts['unjudged']} of {facts['judgements']} {of} of {records[0].system}"
        rest = "there is no score" if score is None else f"the mean over the rest is {score:.2f}"
        notes.append(f"{missing} could not be judged; {rest}")
    tasks = {} if score is None else {task: round(score, 2)}
    return Summary("", tuple(notes), tasks, tasks.get(task), {"judge": facts, **extra}, tuple(late))


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
