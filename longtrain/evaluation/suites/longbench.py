"""Suite `longbench`: LongBench's 16 English tasks with their official settings and scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.evaluation.longbench_rows import TEMPLATES, published, read_tasks, unlike_published
from longtrain.evaluation.published import Published
from longtrain.evaluation.scoring.longbench import classification, count, edit_similarity, retrieval, token_f1
from longtrain.evaluation.scoring.rouge import rouge_l
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.shared import prompts_up_to, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Text, some_of, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

METRICS: dict[str, Callable[[str, str], float]] = {
    "f1": token_f1,
    "rouge_l": rouge_l,
    "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
}
"""Name -> metric of a prediction and an answer; `classification` also needs the classes."""


@dataclass(frozen=True)
class LongBenchSpec:
    """The official settings of a task.

    Args:
        max_new_tokens: the maximum number of tokens of an answer.
        metric: one of `METRICS`, or `classification`.
        rows: number of published examples.
        chat: True if chat models get the prompt in their template. According to the official runner, the
            few-shot and code tasks work better without.
        first_line: score only the first line of an answer, leading line breaks dropped.
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
"""Task -> official settings, in the order of the paper's tables.

Source: LongBench, config/dataset2maxlen.json, eval.py (`dataset2metric`, `scorer`) and pred.py.
"""

NAMES = tuple(SPECS)
PUBLISHED = Published(
    "LongBench", tasks={name: spec.rows for name, spec in SPECS.items()}, settings={"chat": True}
)

COPY = "examples of a copy: tasks, counts, ids, lengths and the answers that are known are those published"
"""Note for examples that do not come from the authors' data set: no hash of its files is published."""


@dataclass(frozen=True)
class LongBenchSettings:
    """The keys of the suite; see conf/suite/longbench.yaml."""

    data: Text
    tasks: some_of(NAMES)  # type: ignore[valid-type]
    limit: Count | None
    max_prompt_tokens: Count | None
    chat: bool

    def __post_init__(self) -> None:
        if self.max_prompt_tokens == 1:
            raise wrong("suite.max_prompt_tokens", 1, "2 or more, or null")


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks named by `suite.tasks`, with the examples at `suite.data`.

    The official runner cuts prompts that are too long for a model; such a run is a variant here, since its
    scores also depend on the model's context window.

    Raises:
        ConfigError: a wrong setting.
        DataError: a missing file or field.
    """
    options = settings_of(LongBenchSettings, settings)
    whole = read_tasks(options.data, options.tasks)
    tasks = [make_task(name, rows, chat=options.chat) for name, rows in whole.items()]
    tasks = [replace(task, rows=task.rows[: options.limit]) for task in tasks]
    departures = PUBLISHED.departures({task.name: task.rows for task in tasks}, vars(options), sampling)
    official = published(options.data)
    if not official:
        departures += _unlike_published(whole)

    def summarise(records: ByTask) -> Summary:
        marks = {name: [float(record.score or 0.0) for record in some] for name, some in records.items()}
        metrics = {name: task_score(some) for name, some in marks.items()}
        average = round(sum(metrics.values()) / len(metrics), 2)
        cut = any(record.cut for some in records.values() for record in some)
        extra = {
            "whole": not (departures or cut),
            "rows_published": {name: SPECS[name].rows for name in marks},
        }
        return Summary(tasks=metrics, average=average, extra=extra)

    return Suite(
        "longbench",
        tuple(prompts_up_to(options.max_prompt_tokens, tasks, target)),
        summarise=summarise,
        title=PUBLISHED.title,
        departures=departures,
        notes=[] if official or departures else [COPY],
    )


def make_task(name: str, rows: tuple[Example, ...], *, chat: bool = True) -> Task:
    """Make a task from examples; the classes are those of the last example, as in the official scorer."""
    spec = SPECS[name]
    return Task(
        name,
        rows,
        TEMPLATES[name],
        spec.max_new_tokens,
        spec.metric,
        judge_of(spec, rows[-1].fields["all_classes"] or ()),
        chat=spec.chat and chat,
        stops=spec.stops,
        min_new_tokens=spec.min_new_tokens,
        expected=lambda row: row.fields["answers"],
    )


def judge_of(spec: LongBenchSpec, classes: Sequence[str]) -> Callable[[str, Example], float]:
    """The scorer of a task: post-processing, then the best metric over the answers (0 without answers)."""

    def compare(prediction: str, answer: str) -> float:
        if spec.metric == "classification":
            return classification(prediction, answer, classes)
        return METRICS[spec.metric](prediction, answer)

    def judge(text: str, example: Example) -> float:
        if spec.first_line:
            text = text.lstrip("\n").split("\n")[0]
        return max([0.0, *(compare(text, answer) for answer in example.fields["answers"])])

    return judge


def task_score(scores: Sequence[float]) -> float:
    """A task's score: 100 times the mean over its examples, rounded to 2 digits.

    Source: LongBench, eval.py, `scorer`; summed from left to right as there.
    """
    total = 0.0
    for score in scores:
        total += score
    return round(100 * total / len(scores), 2)


def _unlike_published(tasks: Mapping[str, Sequence[Example]]) -> list[str]:
    """Notes on examples of a copy that are not the published ones, and on duplicate examples."""
    notes = []
    found = [note for name, rows in tasks.items() for note in unlike_published(name, rows)]
    if found:
        more = f" and {len(found) - 1} more signs" if len(found) > 1 else ""
        notes.append(f"examples that are not recognised as the published ones: {found[0]}{more}")
    if twice := sum(_repeated(rows) for rows in tasks.values()):
        notes.append(f"examples that repeat an earlier one: {twice}")
    return notes


def _repeated(rows: Sequence[Example]) -> int:
    """The number of examples that repeat the question, context and answers of an earlier one."""
    seen = {json.dumps([row.fields[key] for key in ("input", "context", "answers")]) for row in rows}
    return len(rows) - len(seen)
