"""LongBench-Write: requests for texts of a stated length, judged for quality and measured for length.

Source: Bai et al., LongWriter, 2408.07055; THUDM/LongWriter, evaluation. Raw means: SpeContext, table 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.protocol import SLACK
from longtrain.evaluation.judge.longwrite import (
    DIMENSIONS,
    LongWrite,
    count_words,
    figures,
    has_chinese,
    required,
)
from longtrain.evaluation.judge.marker import JudgeMarker, judge_facts, marks_of
from longtrain.evaluation.judge.prompts import longbench_write_prompts
from longtrain.evaluation.judge.settings import UNJUDGED, endpoint_from, judge_settings
from longtrain.evaluation.prompts import encode_chat
from longtrain.evaluation.suite import ByTask, Scale, Suite, Summary
from longtrain.evaluation.suites.rows import read_rows
from longtrain.evaluation.suites.settings import Settings
from longtrain.evaluation.task import Example, Facet, Task

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.target.model import Target

ROWS, ENGLISH_ROWS = 120, 60
MAX_NEW_TOKENS = 32768
TEMPERATURE = 0.5
FIELDS: dict[str, tuple[type, ...]] = {"prompt": (str,), "type": (str,), "length": (int,)}
NAME = "longbench_write"

RANGES = (500, 2000, 4000)
"""Bounds between the groups of wanted lengths that the paper's tables have, words."""


@dataclass(frozen=True)
class LongWriteTask(Task):
    """The requests.

    Args:
        fixed_temperature: of all answers.
    """

    fixed_temperature: float = TEMPERATURE

    def temperature(self, example: Example) -> float | None:
        """One for all."""
        return self.fixed_temperature

    def facets(self, example: Example) -> dict[str, Facet]:
        """The group of its wanted length, in words."""
        return {"wanted": group(required(example))}


def group(words: int) -> str:
    """The group of a wanted length: `0-500`, `500-2000`, `2000-4000` or `4000-`, lower bounds included."""
    low = max((bound for bound in RANGES if bound <= words), default=0)
    high = min((bound for bound in RANGES if bound > words), default=None)
    return f"{low}-{high or ''}"


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The suite, see `longtrain.evaluation.suites`.

    Raises:
        ConfigError: a wrong setting, or no requests.
        DataError: a wrong row.
    """
    values = Settings(settings)
    judge = judge_settings(values)
    endpoint = endpoint_from(judge)
    rows = _read(values)[: values.optional_integer("limit")]
    most = values.optional_integer("max_new_tokens")
    task = LongWriteTask(
        NAME,
        rows,
        template="{prompt}",
        max_new_tokens=most or MAX_NEW_TOKENS,
        metric="judge and length",
        judge=None,
        chat=values.flag("chat"),
        protocol={"length_score": "LongWriter"},
        fixed_temperature=values.number("temperature", least=0, most=2),
    )
    if most is None:
        task = replace(task, max_new_tokens=min(MAX_NEW_TOKENS, _room(task, target)))
    marker = None
    if endpoint is not None:
        rubric = LongWrite(longbench_write_prompts(judge.optional_text("judge.prompts")))
        marker = JudgeMarker(endpoint, rubric, tries=judge.integer("judge.tries", most=100))

    def summarise(records: ByTask) -> Summary:
        return _summary(task, marker, records)

    return Suite("longbench_write", (task,), Scale(), summarise=summarise, marker=marker)


def departures(task: LongWriteTask, marker: JudgeMarker | None) -> list[str]:
    """What is not as in the whole benchmark; with any of it the result is no LongBench-Write score."""
    notes = []
    if len(task.rows) != ROWS:
        english = len(task.rows) == ENGLISH_ROWS and not any(
            has_chinese(row.fields["prompt"]) for row in task.rows
        )
        notes.append(f"{len(task.rows)} of {ROWS} requests" + (", the English ones" if english else ""))
    if task.max_new_tokens < MAX_NEW_TOKENS:
        notes.append(f"texts of up to {task.max_new_tokens} tokens, not {MAX_NEW_TOKENS}")
    if task.fixed_temperature != TEMPERATURE:
        notes.append(f"temperature {task.fixed_temperature:g}, not {TEMPERATURE:g}")
    if not task.chat:
        notes.append("without chat template")
    if marker is not None and not marker.rubric.prompts.official:
        notes.append("a judge prompt that is not the published one")
    return notes


def _summary(task: LongWriteTask, marker: JudgeMarker | None, records: ByTask) -> Summary:
    every = records.get(NAME, ())
    wrong = departures(task, marker)
    title = "Variant of LongBench-Write" if wrong else "LongBench-Write"
    wanted = {row.id: required(row) for row in task.rows}
    marks = [(marks_of(record) or [None])[0] for record in every]
    found = figures(marks, [(wanted[record.example], count_words(record.texts[0])) for record in every])
    found |= {"texts_at_limit": sum(record.turns[0].finish == "length" for record in every)}
    if marker is None:
        return Summary(
            title,
            (*wrong, UNJUDGED),
            extra={"judge": None, "longbench_write": found, "table": table_of(found)},
        )
    facts = judge_facts(marker, every)
    notes = [*wrong, f"judged by {marker.endpoint.model}"]
    if facts["unjudged"]:
        missing = f"{facts['unjudged']} of {facts['judgements']} texts of {every[0].system}"
        notes.append(f"{missing} could not be judged; quality is of the rest")
    score = found["score"]
    extra = {"judge": facts, "longbench_write": found, "table": table_of(found)}
    tasks = {} if score is None else {NAME: round(score, 2)}
    return Summary(title, tuple(notes), tasks, tasks.get(NAME), extra)


def table_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The official scores beside the raw means, for the table of systems."""
    raw = found["dimensions"] or dict.fromkeys(DIMENSIONS)
    columns = {
        "S (official)": found["score"],
        "S_q": found["quality"],
        "S_l": found["length"],
        "raw mean": found["dimensions_mean"],
        **raw,
        "words": found["words"],
    }
    return {"title": "Official scores, 0 to 100, and raw means of the dimensions, 1 to 5", "columns": columns}


def _room(task: Task, target: Target) -> int:
    """Tokens that the target's context leaves beside the longest prompt.

    Raises:
        ConfigError: none.
    """
    window, tokenizer = target.info.max_positions, target.tokenizer
    if tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer, so no text can be given to it")
    around = len(encode_chat(tokenizer, [{"role": "user", "content": ""}])) if task.chat else 0
    texts: list[Any] = [tokenizer(task.prompt(row), verbose=False).input_ids for row in task.examples()]
    longest = max(map(len, texts))
    if (room := window - longest - around - SLACK) < 1:
        raise ConfigError(
            f"a prompt of LongBench-Write has {longest} tokens and the target's context is {window}; "
            "allowed: a target with a longer context"
        )
    return room


def _read(values: Settings) -> tuple[Example, ...]:
    data = values.optional_text("data")
    if data is None:
        raise ConfigError(
            "suite longbench_write needs its requests; pass suite.data=FILE (LongWriter's "
            "evaluation/longbench_write.jsonl)"
        )
    rows = read_rows(data, "LongBench-Write", FIELDS)
    for number, row in enumerate(rows, 1):
        if row["length"] < 1:
            raise DataError(
                f"{data}: row {number}: field 'length' is {row['length']}; it must be 1 or more words"
            )
    return tuple(
        Example(str(number), {key: row[key] for key in FIELDS}) for number, row in enumerate(rows, 1)
    )
