"""LongSpec's evaluation as a suite: LongBench's summaries and code with long answers, and AIME 2024."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import DataError
from longtrain.evaluation.longbench_rows import TEMPLATES, read_tasks
from longtrain.evaluation.published import Published, not_greedy
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.suites import aime24
from longtrain.evaluation.suites.drafted import (
    ACCEPTANCE_SCALE,
    acceptance_summary,
    ended,
    length_bucket,
    tell_of_drafts,
)
from longtrain.evaluation.suites.longbench import SPECS
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, CountOrZero, Text, some_of, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

LONG = ("gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
"""Tasks of LongBench. Source: LongSpec Section 4.1."""
CONTEST = "aime24"
PUBLISHED = Published(
    "Acceptance on long answers",
    tasks={**{name: SPECS[name].rows for name in LONG}, **aime24.PUBLISHED.tasks},
    sha256=aime24.PUBLISHED.sha256,
    fingerprint=aime24.fingerprint,
    settings={
        "limit": None,
        "min_prompt_tokens": 1200,
        "max_new_tokens": 1024,
        "aime24_max_new_tokens": aime24.MAX_NEW_TOKENS,
        "ignore_eos": True,
        "chat": True,
    },
    sampled=lambda sampling: (),
)
"""What LongSpec's runner does."""


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


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """Tasks of LongBench and AIME 2024, with answers as LongSpec measures them.

    Raises:
        ConfigError: a wrong setting, or answers longer than the target's window.
        DataError: a missing file or field, or no prompt that is long enough.
    """
    options = settings_of(SpeculationSettings, settings)
    most = target.info.max_positions - 2
    if options.max_new_tokens > most:
        raise wrong("suite.max_new_tokens", options.max_new_tokens, f"2 to {most}, the target's window")
    named = tuple(name for name in options.tasks if name != CONTEST)
    rows = read_tasks(options.data, named) if named else {}
    notes, tasks = [], [_long(name, some, options, target) for name, some in rows.items()]
    if named:
        notes.append(
            f"LongBench's prompts with answers of {options.max_new_tokens} tokens{ended(options.ignore_eos)} "
            "(LongBench has 512 for summaries and 64 for code)"
        )
        if short := sum(len(rows[task.name]) - len(task.rows) for task in tasks):
            least = options.min_prompt_tokens
            notes.append(f"{short} prompts of at most {least} tokens left out, as LongSpec does")
    if CONTEST in options.tasks:
        contest = _contest(options, target, sampling)
        rows |= {CONTEST: aime24.problems(options.aime24)}
        tasks.append(contest)
        notes.append(
            f"AIME 2024: solutions of at most {contest.max_new_tokens} tokens, over where the text ends"
        )
    return Suite(
        "speculation",
        tuple(replace(task, rows=task.rows[: options.limit]) for task in tasks),
        scale=ACCEPTANCE_SCALE,
        summarise=acceptance_summary,
        title=PUBLISHED.title,
        departures=PUBLISHED.departures(rows, vars(options), sampling),
        notes=[*notes, *not_greedy(sampling)],
        meet=tell_of_drafts,
    )


def _long(name: str, rows: Sequence[Example], options: SpeculationSettings, target: Target) -> Task:
    """A task of LongBench: prompts that are long enough, answers that are not scored."""
    answer, least = options.max_new_tokens, options.min_prompt_tokens
    sized = {row.id: _tokens(target, TEMPLATES[name].format(**row.fields)) for row in rows}
    kept = tuple(row for row in rows if sized[row.id] > least)
    if not kept:
        raise DataError(
            f"no prompt of {name} has more than {least} tokens, the longest has {max(sized.values())}; "
            "pass a smaller suite.min_prompt_tokens, or leave out the task"
        )
    most = options.max_prompt_tokens
    window = target.info.max_positions - answer if most is None else most
    return Task(
        name,
        kept,
        TEMPLATES[name],
        answer,
        "acceptance",
        None,
        chat=options.chat and SPECS[name].chat,
        ignore_eos=options.ignore_eos,
        max_prompt_tokens=most,
        protocol={"min_prompt_tokens": least},
        facets_of=lambda row: {"length": length_bucket(min(sized[row.id], window))},
    )


def _contest(options: SpeculationSettings, target: Target, sampling: Sampling) -> Task:
    """AIME 2024, its answers not scored: what matters is how they are drafted."""
    settings = {
        "name": "speculation",
        "data": options.aime24,
        "limit": options.limit,
        "max_new_tokens": options.aime24_max_new_tokens,
        "chat": options.chat,
        "thinking": False,
    }
    (task,) = aime24.build(settings, target, seed=0, sampling=sampling).tasks
    assert isinstance(task, Task)
    sized = {row.id: length_bucket(_tokens(target, task.prompt(row))) for row in task.rows}
    return replace(
        task,
        metric="acceptance",
        judge=None,
        written=None,
        expected=lambda row: (),
        facets_of=lambda row: {"length": sized[row.id]},
    )


def _tokens(target: Target, text: str) -> int:
    return len(target.require_tokenizer()(text, verbose=False).input_ids)
