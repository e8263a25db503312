"""LongBench-Write: requests for texts of a stated length, judged for quality and measured for length.

Source: Bai et al., LongWriter, 2408.07055; THUDM/LongWriter, evaluation. Raw means: SpeContext, table 4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.protocol import SLACK
from longtrain.evaluation.judge.client import judge_settings
from longtrain.evaluation.judge.marker import JudgeMarker, marker_from, marks_of
from longtrain.evaluation.judge.naming import judged_summary, judging, own_judging
from longtrain.evaluation.judge.prompts import longbench_write_prompts
from longtrain.evaluation.judge.rubrics import (
    DIMENSIONS,
    LongWriteRubric,
    count_words,
    long_write_figures,
    required,
)
from longtrain.evaluation.prompts import encode_chat
from longtrain.evaluation.published import Published, narrowed
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite, Summary
from longtrain.evaluation.suites.shared import read_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Text, within

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

NAME = "longbench_write"
MAX_NEW_TOKENS = 32768
PUBLISHED = Published(
    "LongBench-Write",
    tasks={NAME: 120},
    settings={
        "temperature": 0.5,
        "max_new_tokens": MAX_NEW_TOKENS,
        "chat": True,
        "judge.temperature": 0.5,
        "judge.max_tokens": 1024,
        "judge.tries": 5,
    },
    sampled=narrowed,
)
FIELDS: dict[str, tuple[type, ...]] = {"prompt": (str,), "type": (str,), "length": (int,)}
UNVERIFIED = "the Chinese half of the requests is not compared with the published ones, the English half is"

_ENGLISH = (
    "f4e583e4fd11b2d8d44fc55a6a0fa2263bec17fc91d5f122bff62aa9f9c54a0f53280875936d394a2abdac32ffee84bd"
    "44ebe5529b140848cb0911cda10651594eed1d9deb4b60f0c793fe7b63b46d756dc63bc5e85ce6afea392a7c09f32d29"
    "9f2cc8cf6219750f33cd64a4b61ba38db6a5baf83f7dfb814d43ba60417c5b29ec4b5a7b19b4f048f753f64c29822cf7"
    "f68a660c1296af58848cf02426a817aa1b6e14c00c6413fd3ccae7912b10dbb3a5b5598f42bcbdb9fc347b870399f30d"
    "5fecf74bc893cf6e6c820ef2bc41684b3807991a29c084194bc824a08866a4009d326a4e55ef8f937a5f18456145c25b"
)
ENGLISH = frozenset(_ENGLISH[at : at + 8] for at in range(0, len(_ENGLISH), 8))
"""`row_hash` of each of the 60 published English requests, longbench_write_en.jsonl."""

RANGES = (500, 2000, 4000)
"""Bounds between the groups of wanted lengths that the paper's tables have, words."""


def group(words: int) -> str:
    """The group of a wanted length: `0-500`, `500-2000`, `2000-4000` or `4000-`, lower bounds included."""
    low = max((bound for bound in RANGES if bound <= words), default=0)
    high = min((bound for bound in RANGES if bound > words), default=None)
    return f"{low}-{high or ''}"


@dataclass(frozen=True)
class LongWriteSettings:
    """The keys of conf/suite/longbench_write.yaml that are this suite's own."""

    data: Text | None
    limit: Count | None
    chat: bool
    temperature: Annotated[float, within(0, 2)]
    max_new_tokens: Count | None
    judge: Mapping[str, Any]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The requests at `suite.data`, judged where `suite.judge` names a judge.

    Raises:
        ConfigError: a wrong setting, or no requests.
        DataError: a wrong row.
    """
    own = settings_of(LongWriteSettings, settings)
    judge = judge_settings(own.judge)
    task = Task(
        NAME,
        _read(own.data)[: own.limit],
        template="{prompt}",
        max_new_tokens=own.max_new_tokens or MAX_NEW_TOKENS,
        metric="judge and length",
        judge=None,
        chat=own.chat,
        protocol={"length_score": "LongWriter"},
        facets_of=lambda row: {"wanted": group(required(row))},
        temperature_of=lambda row: own.temperature,
    )
    if own.max_new_tokens is None:
        task = replace(task, max_new_tokens=min(MAX_NEW_TOKENS, _room(task, target)))
    marker = marker_from(judge, lambda: LongWriteRubric(longbench_write_prompts(judge.prompts)))
    asked = vars(own) | {"max_new_tokens": task.max_new_tokens} | judging(marker)
    departures = PUBLISHED.departures({NAME: task.rows}, asked, sampling)
    notes, there = [], {row_hash(row) for row in task.rows}
    if len(task.rows) == PUBLISHED.tasks[NAME]:
        notes.append(UNVERIFIED)
        departures += [] if there >= ENGLISH else ["requests that are not the published ones"]
    elif there == ENGLISH and len(task.rows) == len(ENGLISH):
        notes.append("the requests are the English ones")
    return Suite(
        NAME,
        (task,),
        summarise=lambda records: _summary(task, records.get(NAME, ()), marker),
        title=PUBLISHED.title,
        departures=[*departures, *own_judging(marker)],
        notes=notes,
        marker=marker,
    )


def row_hash(row: Example) -> str:
    """8 hex digits of the hash of a request."""
    content = json.dumps([row.fields[key] for key in FIELDS])
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _summary(task: Task, records: Sequence[Record], marker: JudgeMarker | None) -> Summary:
    wanted = {row.id: required(row) for row in task.rows}
    marks = [(marks_of(record) or [None])[0] for record in records]
    lengths = [(wanted[record.example], count_words(record.texts[0])) for record in records]
    found = long_write_figures(marks, lengths)
    found |= {"texts_at_limit": sum(record.turns[0].finish == "length" for record in records)}
    extra = {NAME: found, "table": table_of(found)}
    return judged_summary(NAME, records, marker, score=found["score"], extra=extra, of="texts")


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
    window, tokenizer = target.info.max_positions, target.require_tokenizer()
    around = len(encode_chat(tokenizer, [{"role": "user", "content": ""}])) if task.chat else 0
    texts: list[Any] = [tokenizer(task.prompt(row), verbose=False).input_ids for row in task.examples()]
    longest = max(map(len, texts))
    if (room := window - longest - around - SLACK) < 1:
        raise ConfigError(
            f"a prompt of LongBench-Write has {longest} tokens and the target's context is {window}; "
            "allowed: a target with a longer context"
        )
    return room


def _read(data: str | None) -> tuple[Example, ...]:
    if data is None:
        raise ConfigError(
            "suite longbench_write needs its requests; pass suite.data=FILE (LongWriter's "
            "evaluation/longbench_write.jsonl)"
        )
    found = []
    for number, row in enumerate(read_rows(data, "LongBench-Write", FIELDS), 1):
        if row["length"] < 1:
            raise DataError(
                f"{data}: row {number}: field 'length' is {row['length']}; it must be 1 or more words"
            )
        found.append(Example(str(number), {key: row[key] for key in FIELDS}))
    return tuple(found)
