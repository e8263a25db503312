"""Figures in pages: `{{ FILE: PLACE | FORM }}` becomes the number that stands there in `recipes/results`."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from repository import RESULTS, ROOT

_FIELD = re.compile(r"\{\{ ([\w./]+\.json): ([^|}]+?) \| ([^|}]+?) \}\}")
_STEP = re.compile(r'(?:^|\.)(?:"([^"]+)"|([^."\[\]]+))|\[([^\]]+)\]')


def fill(text: str, depth: int) -> str:
    """A page's text with its figures, each a link to the table of its file.

    Args:
        text: Markdown.
        depth: folders between the page and docs/.

    Raises:
        LookupError: a file or place does not exist, or is no number.
    """
    up = "../" * (depth + 1)

    def number(match: re.Match[str]) -> str:
        file, place, form = match.groups()
        return f"[{shown(file, place, form)}]({up}{RESULTS}/{file})"

    return _FIELD.sub(number, text)


def shown(file: str, place: str, form: str) -> str:
    """One figure as text.

    Args:
        file: relative to `recipes/results`.
        place: `runs[name=two_methods].rows[0].ms.median`; brackets hold a number, or conditions of which one
            row alone may fulfil all; a key with dots stands in quotation marks.
        form: of Python's `format`, or `GiB` and `MB` for bytes.

    Raises:
        LookupError: see `fill`.
    """
    value = at(_read(file), place, f"{file}: {place}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LookupError(f"{file}: {place} is {value!r}, no number")
    if form == "GiB":
        return f"{value / 2**30:.1f} GiB"
    return f"{value / 1e6:.1f} MB" if form == "MB" else format(value, form)


def at(value: Any, place: str, where: str) -> Any:
    """What stands at a place of a JSON value.

    Raises:
        LookupError: nothing, or more than one row.
    """
    for quoted, plain, condition in _STEP.findall(place):
        if not condition:
            key = quoted or plain
            if not isinstance(value, dict) or key not in value:
                raise LookupError(
                    f"{where}: no key '{key}'; known: {', '.join(value) if isinstance(value, dict) else '-'}"
                )
            value = value[key]
        elif condition.isdigit():
            value = value[int(condition)]
        else:
            wanted = [part.split("=", 1) for part in condition.split(",")]
            rows = [row for row in value if all(str(row.get(key)) == said for key, said in wanted)]
            if len(rows) != 1:
                raise LookupError(f"{where}: {len(rows)} rows have {condition}; one must")
            value = rows[0]
    return value


@cache
def _read(file: str) -> Any:
    path = ROOT / RESULTS / file
    if not path.is_file():
        raise LookupError(f"{file} is not in {RESULTS}")
    return json.loads(path.read_text(encoding="utf-8"))
