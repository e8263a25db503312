"""Prompts from files of JSON lines, in the fields that benchmarks and users commonly have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtrain.data.read.files import JSONL_SUFFIXES, PACKED_SUFFIXES, local_file, read_jsonl
from longtrain.errors import DataError
from longtrain.evaluation.longbench_rows import TEMPLATES
from longtrain.evaluation.suites.shared import distinct
from longtrain.evaluation.task import Example

FIELDS = "prompt, messages, turns, problem, question, or context and input as LongBench has them"
NAMES = ("id", "_id", "question_id", "index")
"""Fields that name a row."""
RUNNING_TEXT = "text"
"""The field of rows that are not prompts, but text to be continued."""


def is_prompts(where: str) -> bool:
    """True if a path is a file of JSON lines whose first row is a prompt, and not running text."""
    path = local_file(where)
    plain = path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path
    if not path.is_file() or plain.suffix not in JSONL_SUFFIXES:
        return False
    first = next((row for _, row in read_jsonl(path)), {})
    return RUNNING_TEXT not in first or _prompt(first) is not None


def prompt_rows(where: str) -> tuple[Example, ...]:
    """Read a file of JSON lines; each example has the field `prompt`.

    The prompt is `prompt`; of `messages` or `turns` the first of the user; `problem` or `question`; of
    LongBench's rows their task's template, or else `context` and `input` with an empty line between them.

    Args:
        where: a file (plain, .xz or .gz) or `hub:ORG/NAME/FILE`.

    Raises:
        DataError: there is no row, or one without a prompt.
    """
    names: list[str] = []
    prompts: list[str] = []
    for place, row in read_jsonl(local_file(where)):
        prompt = _prompt(row)
        if not prompt:
            raise DataError(
                f"{place}: no prompt among the fields {', '.join(row) or '(none)'}; allowed: {FIELDS}; or "
                f"{RUNNING_TEXT} in every row, to be continued"
            )
        names.append(str(next((row[key] for key in NAMES if key in row), len(names) + 1)))
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{where} has no row; each row is a JSON object with {FIELDS}")
    return tuple(
        Example(*both) for both in zip(distinct(names), ({"prompt": one} for one in prompts), strict=True)
    )


def _prompt(row: Mapping[str, Any]) -> str | None:
    """The prompt of a row, or None if it has none."""
    context, task = row.get("context"), row.get("input", row.get("question", ""))
    if isinstance(context, str) and isinstance(task, str):
        template = TEMPLATES.get(str(row.get("dataset")))
        return template.format(**row) if template else f"{context}\n\n{task}".rstrip()
    for turns in (row.get("messages"), row.get("turns"), row.get("conversations")):
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, str):
                return turn
            if isinstance(turn, Mapping) and turn.get("role", "user") == "user":
                text = turn.get("content")
                return text if isinstance(text, str) else None
    found = (row.get(key) for key in ("prompt", "problem", "question", "input"))
    return next((text for text in found if isinstance(text, str)), None)
