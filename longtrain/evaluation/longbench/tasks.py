"""The 16 tasks: metric, generation length, number of published rows, chat and stop rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longtrain.errors import ConfigError
from longtrain.evaluation.longbench.files import read_tasks
from longtrain.evaluation.longbench.templates import TEMPLATES
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
class Spec:
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
    "narrativeqa": Spec(128, "f1"),
    "qasper": Spec(128, "f1"),
    "multifieldqa_en": Spec(64, "f1", rows=150),
    "hotpotqa": Spec(32, "f1"),
    "2wikimqa": Spec(32, "f1"),
    "musique": Spec(32, "f1"),
    "gov_report": Spec(512, "rouge_l"),
    "qmsum": Spec(512, "rouge_l"),
    "multi_news": Spec(512, "rouge_l"),
    "trec": Spec(64, "classification", chat=False, first_line=True),
    "triviaqa": Spec(32, "f1", chat=False, first_line=True),
    "samsum": Spec(128, "rouge_l", chat=False, first_line=True, stops=("\n",), min_new_tokens=1),
    "passage_count": Spec(32, "count"),
    "passage_retrieval_en": Spec(32, "retrieval"),
    "lcc": Spec(64, "edit_similarity", rows=500, chat=False),
    "repobench-p": Spec(64, "edit_similarity", rows=500, chat=False),
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


def load(where: str, names: Sequence[str] = NAMES, *, limit: int | None = None) -> list[LongBenchTask]:
    """Tasks with their rows.

    Args:
        where: see `read_tasks`.
        names: of `NAMES`.
        limit: only so many rows of each, from the first; the result is then no LongBench score (`title`).

    Raises:
        ConfigError: an unknown or repeated task, a limit below 1, or nothing at `where`.
        DataError: a missing file or field.
    """
    unknown = [name for name in names if name not in SPECS]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(f"LongBench tasks {list(names)}; allowed: each once of {', '.join(NAMES)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} rows of a task; allowed: 1 or more, or null for all")
    return [make_task(name, rows[:limit]) for name, rows in read_tasks(where, tuple(names)).items()]


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


def judge_of(spec: Spec, classes: Sequence[str]) -> Callable[[str, Example], float]:
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
