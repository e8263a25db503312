"""LongSpec's evaluation as a suite: LongBench's summaries and code with long answers, and AIME 2024.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.errors import DataError
from longtrain.evaluation.longbench import SPECS, TEMPLATES, read_tasks
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites import aime24
from longtrain.evaluation.suites.shared import (
    ACCEPTANCE_SCALE,
    acceptance_summary,
    length_bucket,
    not_greedy,
    settings_of,
)
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, CountOrZero, Text, some_of, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

LONG = ("gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
"""Tasks of LongBench. Source: LongSpec Section 4.1."""
CONTEST = "aime24"
TITLE = "Acceptance on long answers"
NEW_TOKENS, LEAST_TOKENS = 1024, 1200
"""Tokens of an answer and those that a prompt must be longer than, in LongSpec's runner."""


@dataclass(frozen=True)
class SpeculationSettings:
    """The keys of the suite; see conf/suite/speculation.yaml."""

    tasks: some_of((*LONG, CONTEST))  # type: ignore[valid-type]
    data: Text
    aime24: Text
    limit: Count | None
    min_prompt_tokens: CountOrZero
    max_prompt_tokens: Count | None
    max_new_tokens: Count
    aime24_max_new_tokens: Count
    ignore_eos: bool
    chat: bool

    def __post_init__(self) -> None:
        for key in ("max_prompt_tokens", "max_new_tokens", "aime24_max_new_tokens"):
            if getattr(self, key) == 1:
                raise wrong(f"suite.{key}", 1, "2 or more")


@dataclass(frozen=True)
class LongAnswers(Task):
    """Prompts of a benchmark whose answers are not scored: what matters is how they are drafted.

    Args:
        lengths: example -> prompt length it is counted under (`length_bucket`).
    """

    lengths: Mapping[str, int] = field(default_factory=dict)

    def facets(self, example: Example) -> dict[str, int | float | str]:
        """Prompt length."""
        return {"length": self.lengths[example.id]}

    def score(self, text: str, example: Example) -> float | None:
        """Gives no score: answers that go on past their end have no meaningful score."""
        return None


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks that `suite.tasks` names.

    Args:
        settings: see conf/suite/speculation.yaml.
        target: its tokenizer measures prompts, its window decides how long they may be.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes.

    Raises:
        ConfigError: a wrong setting, or answers longer than the target's window.
        DataError: a missing file or field, or no prompt is long enough.
    """
    options, _ = settings_of(SpeculationSettings, settings), target.require_tokenizer()
    names, most = options.tasks, target.info.max_positions - 2
    if options.max_new_tokens > most:
        raise wrong("suite.max_new_tokens", options.max_new_tokens, f"2 to {most}, the target's window")
    notes, departures = list[str](), list[str]()
    if len(names) <= len(LONG):
        departures.append(f"{len(names)} of {len(LONG) + 1} tasks")
    tasks = _long(options, target, notes, departures)
    if CONTEST in names:
        tasks.append(_contest(options, target, notes, departures, sampling))
    notes += not_greedy(sampling)

    def summarise(records: ByTask) -> Summary:
        cut = sum(record.cut for some in records.values() for record in some)
        other = [*departures, *([f"prompts cut in the middle: {cut}"] if cut else [])]
        return acceptance_summary(f"Variant of {TITLE}" if other else TITLE, records, [*other, *notes])

    return Suite("speculation", tuple(tasks), scale=ACCEPTANCE_SCALE, summarise=summarise)


def _long(
    options: SpeculationSettings, target: Target, notes: list[str], departures: list[str]
) -> list[Task]:
    """LongBench's tasks; adds to `notes` what they are, and to `departures` what LongSpec does not do."""
    names = tuple(name for name in options.tasks if name != CONTEST)
    if not names:
        return []
    answer, least, chat = options.max_new_tokens, options.min_prompt_tokens, options.chat
    most, limit, ignore_eos = options.max_prompt_tokens, options.limit, options.ignore_eos
    tasks: list[Task] = []
    short = 0
    for name, rows in read_tasks(options.data, names).items():
        if len(rows) != SPECS[name].rows:
            departures.append(f"{len(rows)} of {SPECS[name].rows} rows of {name}")
        sized = {row.id: _tokens(target, TEMPLATES[name].format(**row.fields)) for row in rows}
        kept = tuple(row for row in rows if sized[row.id] > least)
        short += len(rows) - len(kept)
        if not kept:
            raise DataError(
                f"no prompt of {name} has more than {least} tokens, the longest has {max(sized.values())}; "
                "pass a smaller suite.min_prompt_tokens, or leave out the task"
            )
        window = target.info.max_positions - answer if most is None else most
        lengths = {row.id: length_bucket(min(sized[row.id], window)) for row in kept[:limit]}
        tasks.append(
            LongAnswers(
                name,
                kept[:limit],
                TEMPLATES[name],
                answer,
                "acceptance",
                None,
                chat=chat and SPECS[name].chat,
                ignore_eos=ignore_eos,
                max_prompt_tokens=most,
                protocol={"min_prompt_tokens": least},
                lengths=lengths,
            )
        )
    ends = "the end of text ignored" if ignore_eos else "or fewer where the text ends"
    notes.append(
        f"LongBench's prompts with answers of {answer} tokens, {ends} (LongBench has 512 for summaries and "
        "64 for code)"
    )
    if short:
        notes.append(f"{short} prompts of at most {least} tokens left out, as LongSpec does")
    if answer != NEW_TOKENS:
        departures.append(f"answers of {answer} tokens instead of {NEW_TOKENS}")
    if least != LEAST_TOKENS:
        departures.append(f"prompts of more than {least} tokens instead of {LEAST_TOKENS}")
    if not ignore_eos:
        departures.append("answers end where the text does")
    if not chat:
        departures.append("without chat template")
    if limit is not None:
        departures.append(f"the first {limit} prompts of each task")
    return tasks


def _contest(
    options: SpeculationSettings,
    target: Target,
    notes: list[str],
    departures: list[str],
    sampling: Sampling,
) -> Task:
    """AIME 2024; adds to `notes` how long solutions are, and to `departures` what is not as published."""
    asked = options.aime24_max_new_tokens
    settings = {
        "data": options.aime24,
        "limit": options.limit,
        "max_new_tokens": asked,
        "chat": options.chat,
        "thinking": False,
    }
    (task,) = aime24.build({"name": "speculation", **settings}, target, seed=0, sampling=sampling).tasks
    assert isinstance(task, Task)
    if asked != aime24.MAX_NEW_TOKENS:
        departures.append(f"AIME 2024: solutions of {asked} tokens instead of {aime24.MAX_NEW_TOKENS}")
    if options.limit is None and aime24.fingerprint(list(task.examples())) != aime24.PUBLISHED:
        departures.append("AIME 2024: problems or answers are not those published")
    notes.append(f"AIME 2024: solutions of at most {task.max_new_tokens} tokens, over where the text ends")
    lengths = {row.id: length_bucket(_tokens(target, task.prompt(row))) for row in task.examples()}
    return LongAnswers(**{**vars(task), "metric": "acceptance", "judge": None}, lengths=lengths)


def _tokens(target: Target, text: str) -> int:
    return len(target.require_tokenizer()(text, verbose=False).input_ids)
