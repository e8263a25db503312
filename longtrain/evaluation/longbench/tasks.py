"""The 16 tasks with their official settings, their scores, and what a result may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longtrain.errors import DataError
from longtrain.evaluation.longbench.files import TEMPLATES, read_tasks
from longtrain.evaluation.metrics.longbench import classification, count, edit_similarity, retrieval, token_f1
from longtrain.evaluation.metrics.rouge import rouge_l
from longtrain.evaluation.task import Example, Task

METRICS: dict[str, Callable[[str, str], float]] = {
    "f1": token_f1,
    "rouge_l": rouge_l,
    "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
}
"""Metrics of a prediction and an answer; `classification` also needs the classes."""


@dataclass(frozen=True)
class LongBenchSpec:
    """The official settings of a task.

    Args:
        max_new_tokens: most tokens of an answer.
        metric: one of `METRICS`, or `classification`.
        rows: number of published examples.
        chat: whether chat models get the prompt in their template. The few-shot and code tasks are better off
            without, says the official runner.
        first_line: whether only the first line of an answer counts, leading line breaks dropped.
        stops: see `Task`.
        min_new_tokens: see `Task`.
    """

    max_new_tokens: int
    metric: str
    rows: int = 200
    chat: bool = True
    first_line: bool = False
    stops: tuple[str, ...] = ()
    min_new_tokens: int = 0


SPECS = {
    "narrativeqa": LongBenchSpec(128, "f1"),
    "qasper": LongBenchSpec(128, "f1"),
    "multifieldqa_en": LongBenchSpec(64, "f1", rows=150),
    "hotpotqa": LongBenchSpec(32, "f1"),
    "2wikimqa": LongBenchSpec(32, "f1"),
    "musique": LongBenchSpec(32, "f1"),
    "gov_report": LongBenchSpec(512, "rouge_l"),
    "qmsum": LongBenchSpec(512, "rouge_l"),
    "multi_news": LongBenchSpec(512, "rouge_l"),
    "trec": LongBenchSpec(64, "classification", chat=False, first_line=True),
    "triviaqa": LongBenchSpec(32, "f1", chat=False, first_line=True),
    "samsum": LongBenchSpec(128, "rouge_l", chat=False, first_line=True, stops=("\n",), min_new_tokens=1),
    "passage_count": LongBenchSpec(32, "count"),
    "passage_retrieval_en": LongBenchSpec(32, "retrieval"),
    "lcc": LongBenchSpec(64, "edit_similarity", rows=500, chat=False),
    "repobench-p": LongBenchSpec(64, "edit_similarity", rows=500, chat=False),
}
"""Task -> settings, in the order of the paper's tables.

Source: LongBench, config/dataset2maxlen.json, eval.py (`dataset2metric`, `scorer`) and pred.py.
"""

NAMES = tuple(SPECS)


class LongBenchTask(Task):
    """A task whose rows name their answers."""

    def references(self, example: Example) -> list[str]:
        """The answers; the score is that of the best."""
        return list(example.fields["answers"])


def load(where: str, names: Sequence[str] = NAMES) -> list[LongBenchTask]:
    """Tasks with all their rows.

    Args:
        where: see `read_tasks`.
        names: of `NAMES`.

    Raises:
        ConfigError: nothing is at `where`.
        DataError: a missing file or field.
    """
    return [make_task(name, rows) for name, rows in read_tasks(where, tuple(names)).items()]


def make_task(name: str, rows: tuple[Example, ...]) -> LongBenchTask:
    """A task on rows; classes are those of the last row, as the official scorer takes them."""
    spec = SPECS[name]
    return LongBenchTask(
        name,
        rows,
        TEMPLATES[name],
        spec.max_new_tokens,
        spec.metric,
        judge_of(spec, rows[-1].fields["all_classes"] or ()),
        chat=spec.chat,
        stops=spec.stops,
        min_new_tokens=spec.min_new_tokens,
    )


def judge_of(spec: LongBenchSpec, classes: Sequence[str]) -> Callable[[str, Example], float]:
    """The scorer of a task: post-processing, then the best metric over the answers (0 if there is none)."""

    def compare(prediction: str, answer: str) -> float:
        if spec.metric == "classification":
            return classification(prediction, answer, classes)
        return METRICS[spec.metric](prediction, answer)

    def judge(text: str, example: Example) -> float:
        if spec.first_line:
            text = text.lstrip("\n").split("\n")[0]
        return max([0.0, *(compare(text, answer) for answer in example.fields["answers"])])

    return judge


WHOLE = "LongBench"
VARIANT = "Variant of LongBench"
"""The names a result can have: with any departure, a cut prompt among them, it is a `VARIANT`."""

NAMED = 3
"""Most tasks that a note lists by name."""


@dataclass(frozen=True)
class TaskRun:
    """What came of a task.

    Args:
        scores: of its examples, 0 to 1.
        cut: prompts whose middle was left out.
        room: most tokens of a prompt.
    """

    scores: tuple[float, ...]
    cut: int = 0
    room: int = 0


def task_score(scores: Sequence[float]) -> float:
    """A task's score: 100 times the mean over its examples, rounded to 2 digits.

    Raises:
        DataError: no example.

    Source: LongBench, eval.py, `scorer`; summed from left to right as there.
    """
    if not scores:
        raise DataError("a LongBench task has no scored example; run at least one")
    total = 0.0
    for score in scores:
        total += score
    return round(100 * total / len(scores), 2)


def title(
    ran: Mapping[str, TaskRun],
    *,
    chat: bool = True,
    departures: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """What a result may be called, and every departure from the whole benchmark.

    `LongBench` is only what ran all rows of all 16 tasks, with chat templates where the benchmark has them,
    every prompt whole and nothing else departed from. The official runner cuts prompts that are too long for
    a model; such a run is a `VARIANT` here, since its figures are those of the model's window too.

    Args:
        ran: what was run, by task.
        chat: whether chat templates were used.
        departures: others.
        notes: what is to be said beside a whole result.
    """
    wrong = []
    if set(ran) != set(SPECS):
        wrong.append(f"{len(set(ran) & set(SPECS))} of {len(SPECS)} tasks")
    short = [name for name in SPECS if name in ran and len(ran[name].scores) != SPECS[name].rows]
    if short:
        have, all_ = sum(len(ran[name].scores) for name in short), sum(SPECS[name].rows for name in short)
        which = ", ".join(short) if len(short) <= NAMED else f"{len(short)} tasks"
        wrong.append(f"{have} of {all_} rows of {which}")
    wrong += _cut(ran)
    if not chat:
        wrong.append("without chat template")
    wrong += departures
    return (VARIANT, tuple(wrong)) if wrong else (WHOLE, tuple(notes))


def _cut(ran: Mapping[str, TaskRun]) -> list[str]:
    """The note of prompts that were cut, with what they were cut to: each task has its own room."""
    cut = {name: task for name, task in ran.items() if task.cut}
    if not cut:
        return []
    count, rooms = sum(task.cut for task in cut.values()), {task.room for task in cut.values()}
    of = f"{count} of {sum(len(task.scores) for task in ran.values())} prompts cut"
    if len(rooms) == 1:
        return [f"{of} to {rooms.pop()} tokens"]
    if len(cut) <= NAMED:
        return [
            f"{of}: " + ", ".join(f"{one.cut} of {name} to {one.room} tokens" for name, one in cut.items())
        ]
    return [f"{of} to {min(rooms)} to {max(rooms)} tokens, by task"]
