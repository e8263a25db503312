"""Suite `speculation`: acceptance of drafts on published prompts: LongSpec's long answers, QuantSpec's
documents.

LongSpec measures LongBench's summaries and code and the problems of AIME 2024; QuantSpec measures documents
cut to a given prompt length (`suites/documents.py`). Answers are not scored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.longbench_rows import TEMPLATES, read_tasks
from longtrain.evaluation.prompts import encode
from longtrain.evaluation.published import Published, not_greedy
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.suites import documents
from longtrain.evaluation.suites.documents import CORPORA
from longtrain.evaluation.suites.drafted import (
    ACCEPTANCE_SCALE,
    acceptance_summary,
    ended,
    length_bucket,
    note_missing_drafts,
)
from longtrain.evaluation.suites.longbench import SPECS
from longtrain.evaluation.suites.shared import read_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, CountOrZero, Lengths, Text, some_of, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

LONG = ("gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
"""Tasks from LongBench. Source: LongSpec Section 4.1."""
CONTEST = "aime24"
CONTEST_TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The instruction for mathematics recommended by Qwen's model cards (QwQ-32B, Qwen3)."""
MARGIN = 32
"""Tokens left free between the longest problem, its solution and the end of the target's context window."""


def fingerprint(rows: Sequence[Example]) -> str:
    """Hash of problems and answers in any order; only letters and digits of a problem's text count."""
    plain = sorted(
        f"{re.sub('[^0-9a-z]+', '', str(row.fields['problem']).lower())} {row.fields['answer']}"
        for row in rows
    )
    return hashlib.sha256("\n".join(plain).encode()).hexdigest()


PUBLISHED = Published(
    "Acceptance on long answers",
    tasks={**{name: SPECS[name].rows for name in LONG}, CONTEST: 30},
    sha256={CONTEST: "31800c941395d49f30bed365e3e8ad5e6760fcadab7caddc76801d9f8689854e"},
    fingerprint=fingerprint,
    settings={
        "limit": None,
        "min_prompt_tokens": 1200,
        "max_new_tokens": 1024,
        "aime24_max_new_tokens": 32768,
        "ignore_eos": True,
        "chat": True,
    },
    sampled=lambda sampling: (),
)
"""The settings of LongSpec's runner. The problems of AIME 2024 are those of both contests, as
HuggingFaceH4/aime_2024 and Qwen2.5-Math (evaluation/data/aime24) have them."""


@dataclass(frozen=True)
class SpeculationSettings:
    """The keys of the suite; see conf/suite/speculation.yaml."""

    tasks: some_of((*LONG, CONTEST, *CORPORA), all_if_empty=False)  # type: ignore[valid-type]
    data: Text
    aime24: Text
    documents: Text | None
    lengths: Lengths | None
    limit: Count | None
    min_prompt_tokens: CountOrZero
    max_prompt_tokens: Count | None
    max_new_tokens: Count
    aime24_max_new_tokens: Count
    documents_max_new_tokens: Count
    ignore_eos: bool
    chat: bool

    def __post_init__(self) -> None:
        for key in (
            "max_prompt_tokens",
            "max_new_tokens",
            "aime24_max_new_tokens",
            "documents_max_new_tokens",
        ):
            if getattr(self, key) == 1:
                raise wrong(f"suite.{key}", 1, "2 or more")


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks of `suite.tasks`, with answer lengths as LongSpec and QuantSpec measure them.

    Raises:
        ConfigError: a wrong setting, or prompts or answers beyond the target's context window.
        DataError: a missing file or field, or no prompt is long enough.
    """
    options = settings_of(SpeculationSettings, settings)
    corpora = [name for name in options.tasks if name in CORPORA]
    others = [name for name in options.tasks if name not in CORPORA]
    tasks, notes, departures = _answers(others, options, target, sampling) if others else ([], [], [])
    for name in corpora:
        task, remarks = documents.task_of(name, options, target)
        tasks.append(task)
        notes += remarks
        departures += documents.departures_of(name, options, sampling)
    tasks.sort(key=lambda task: options.tasks.index(task.name))
    if others and corpora:
        departures.append("tasks of LongSpec and of QuantSpec together")
    title = CORPORA[corpora[0]].title if len(corpora) == 1 else documents.TITLE
    return Suite(
        "speculation",
        tuple(tasks),
        scale=ACCEPTANCE_SCALE,
        summarise=acceptance_summary,
        title=PUBLISHED.title if others else title,
        departures=list(dict.fromkeys(departures)),
        notes=[*dict.fromkeys(notes), *not_greedy(sampling)],
        meet=note_missing_drafts,
    )


def _answers(
    names: Sequence[str], options: SpeculationSettings, target: Target, sampling: Sampling
) -> tuple[list[Task], list[str], list[str]]:
    """LongSpec's tasks, notes on them, and departures from LongSpec's measurement."""
    most = target.info.max_positions - 2
    if options.max_new_tokens > most:
        raise wrong("suite.max_new_tokens", options.max_new_tokens, f"2 to {most}, the target's window")
    named = tuple(name for name in names if name != CONTEST)
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
    if CONTEST in names:
        rows |= {CONTEST: problems(options.aime24)}
        contest = _contest(rows[CONTEST], options, target)
        tasks.append(contest)
        notes.append(
            f"AIME 2024: solutions of at most {contest.max_new_tokens} tokens, over where the text ends"
        )
    departures = PUBLISHED.departures(rows, vars(options), sampling)
    return [replace(task, rows=task.rows[: options.limit]) for task in tasks], notes, departures


def _long(name: str, rows: Sequence[Example], options: SpeculationSettings, target: Target) -> Task:
    """A task of LongBench with the prompts that are long enough; answers are not scored."""
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


def _contest(rows: Sequence[Example], options: SpeculationSettings, target: Target) -> Task:
    """AIME 2024, with solutions limited by the room in the target's context window."""
    tokenizer, window = target.require_tokenizer(), target.info.max_positions
    rows = rows[: options.limit]
    texts = {row.id: CONTEST_TEMPLATE.format(**row.fields) for row in rows}
    sized = {name: length_bucket(_tokens(target, text)) for name, text in texts.items()}
    longest = max(
        len(encode(tokenizer, text, chat=options.chat, max_tokens=window).ids) for text in texts.values()
    )
    room = window - longest - MARGIN
    if room < 1:
        raise ConfigError(
            f"{CONTEST}: the target reads {window} tokens, its longest prompt leaves no room for an answer; "
            "take a target with a longer window, or leave out the task"
        )
    return Task(
        CONTEST,
        tuple(rows),
        CONTEST_TEMPLATE,
        min(options.aime24_max_new_tokens, room),
        "acceptance",
        None,
        chat=options.chat,
        facets_of=lambda row: {"length": sized[row.id]},
    )


def problems(where: str) -> tuple[Example, ...]:
    """Read the problems of a file or data set: examples with `problem` (or `question`) and `answer`.

    Raises:
        DataError: a field is missing or has another type.
    """
    found = []
    for number, row in enumerate(read_rows(where, "AIME 2024", {"answer": (str, int)}), 1):
        problem = row.get("problem", row.get("question"))
        if not isinstance(problem, str) or not problem.strip():
            raise DataError(f"{where}, example {number}: field 'problem' (or 'question') must be a text")
        answer = str(row["answer"]).strip().lstrip("0") or "0"
        found.append(Example(str(row.get("id", number)), {"problem": problem, "answer": answer}))
    return tuple(found)


def _tokens(target: Target, text: str) -> int:
    return len(target.require_tokenizer()(text, verbose=False).input_ids)
