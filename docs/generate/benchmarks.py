"""Benchmark pages, from the files in `recipes/results` and nothing else."""

from __future__ import annotations

import json
from typing import Any

from repository import RESULTS, ROOT, anchor, group, results

Row = dict[str, Any]
Tables = dict[str, list[Row]]

OPEN_ROWS = 40
"""A table with more rows is folded."""
MOST_ROWS = 300
"""A table with more rows is in the file alone."""
NAMES = (
    "name",
    "label",
    "system",
    "policy",
    "method",
    "run",
    "kernel",
    "cache",
    "section",
    "reading",
    "task",
    "length",
    "budget",
    "prompt_tokens",
    "batch",
    "drafted",
    "member",
    "key",
)
"""What a table's rows keep of the rows that they stand in."""
FACTS = ("command", "argv", "hardware", "gpu", "machine", "versions", "date", "time_utc", "git")
"""What opens a file's section."""


def pages() -> dict[str, str]:
    """Address of every benchmark page -> its Markdown."""
    grouped: dict[str, list[str]] = {}
    for file in results():
        grouped.setdefault(group(file), []).append(file)
    found = {f"benchmarks/{name}.md": _page(name, files) for name, files in grouped.items()}
    rows = [
        f"| [{name}]({name}.md) | {', '.join(f'`{file}`' for file in files)} |"
        for name, files in grouped.items()
    ]
    about = (
        "These pages are made of the files in `recipes/results` when the site is built, and of nothing else. "
        "[Measured](../../recipes/results/README.md) explains them: what was compared, and what fell short.\n"
    )
    found["benchmarks/index.md"] = "\n".join(
        ["# Benchmarks", "", about, "| page | files |", "|---|---|", *rows, ""]
    )
    return found


def _page(name: str, files: list[str]) -> str:
    return "\n".join([f"# {name}", "", *(_section(file) for file in files)])


def _section(file: str) -> str:
    data = json.loads((ROOT / RESULTS / file).read_text(encoding="utf-8"))
    lines = [f"## {file.rpartition('/')[2].removesuffix('.json')} {{#{anchor(file)}}}", ""]
    lines += [f"[`{file}`](../../{RESULTS}/{file}#raw)", ""]
    tables: Tables = {}
    cells = _walk(data if isinstance(data, dict) else {"rows": data}, "", {}, tables)
    facts = {key: value for key, value in cells.items() if key.split(".")[0] in FACTS}
    settings = {
        key: value
        for key, value in cells.items()
        if key.split(".")[0] in ("settings", "protocol", "config", "assumptions")
    }
    for command in _commands(data):
        lines += ["```sh", command, "```", ""]
    rest = {key: value for key, value in cells.items() if key not in facts and key not in settings}
    if rest:
        lines += _pairs(rest)
    for title, rows in tables.items():
        lines += _table(title, rows)
    about = {
        key: value
        for key, value in {**facts, **settings}.items()
        if key.split(".")[0] not in ("command", "argv")
    }
    if about:
        lines += _fold("Machine, versions and settings", _pairs(about))
    return "\n".join(lines)


def _commands(data: Any) -> list[str]:
    """How a file says that it was made: `command`, `commands` or `argv`."""
    if not isinstance(data, dict):
        return []
    found = data.get("command") or data.get("commands") or " ".join(data.get("argv") or ())
    found = found.replace("longtrain/__main__.py", "longtrain") if isinstance(found, str) else found
    found = list(found.values()) if isinstance(found, dict) else found
    return [str(line) for line in found] if isinstance(found, list) else [found] if found else []


def _walk(value: Row, path: str, names: Row, tables: Tables) -> Row:
    """The plain values of a mapping by their dotted keys; rows below it go to `tables`, by their path."""
    cells: Row = {}
    below: list[tuple[str, list[Row]]] = []

    def look(key: str, one: Any) -> None:
        if (interval := _interval(one)) is not None:
            cells[key] = interval
        elif isinstance(one, dict) and _is_table(one):
            below.append((key, [{"key": name, **row} for name, row in one.items()]))
        elif isinstance(one, dict):
            for name, inner in one.items():
                look(f"{key}.{name}" if key else name, inner)
        elif isinstance(one, list) and one and all(isinstance(row, dict) for row in one):
            below.append((key, one))
        elif isinstance(one, list):
            if len(one) <= 16 and key not in ("commands",):
                cells[key] = ", ".join(_text(part) for part in one)
        else:
            cells[key] = one

    look("", value)
    mine = {**names, **{key: cells[key] for key in NAMES if key in cells}}
    for key, rows in below:
        here = f"{path}.{key}" if path else key
        table = tables.setdefault(here, [])  # before the rows below it
        for row in rows:
            table.append({**mine, **_walk(row, here, mine, tables)})
    return cells


def _interval(value: Any) -> str | None:
    """A figure with its interval, or a median with its 10th and 90th percentile, as one text."""
    if isinstance(value, dict):
        for middle, low, high in (("value", "low", "high"), ("median", "p10", "p90")):
            if {middle, low, high} <= {*value} <= {middle, low, high, "n", "prompts"}:
                return f"{_text(value[middle])} [{_text(value[low])}, {_text(value[high])}]"
    return None


def _is_table(value: Row) -> bool:
    """Whether a mapping's values are rows of one kind: two or more, with half of their keys in common."""
    rows = [row for row in value.values() if isinstance(row, dict) and _interval(row) is None]
    if len(rows) < 2 or len(rows) != len(value):
        return False
    shared = set.intersection(*({*row} for row in rows))
    return len(shared) * 2 >= max(len(row) for row in rows) > 0


def _table(title: str, rows: list[Row]) -> list[str]:
    """A table; columns that say the same in every row are said once, above it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    same = [
        key
        for key in columns
        if len(rows) > 1 and key not in NAMES and len({str(row.get(key)) for row in rows}) == 1
    ]
    shown = [key for key in columns if key not in same and any(row.get(key) is not None for row in rows)]
    lines = [f"**{title}**", ""]
    if len(rows) > MOST_ROWS:
        return [*lines, f"{len(rows)} rows: in the file.", ""]
    said = [f"`{key}` {_cell(rows[0].get(key))}" for key in same if rows[0].get(key) is not None]
    if said:
        lines += [f"The same in every row: {'; '.join(said)}.", ""]
    if not shown:
        return lines
    body = [f"| {' | '.join(_cell(row.get(key)) for key in shown)} |" for row in rows]
    table = [f"| {' | '.join(shown)} |", f"|{'---|' * len(shown)}", *body, ""]
    return [*lines, *(table if len(rows) <= OPEN_ROWS else _fold(f"{len(rows)} rows", table))]


def _pairs(cells: Row) -> list[str]:
    rows = [f"| `{key}` | {_cell(value)} |" for key, value in cells.items() if value is not None]
    return ["| key | value |", "|---|---|", *rows, ""]


def _fold(title: str, lines: list[str]) -> list[str]:
    return [f'??? note "{title}"', "", *(f"    {line}".rstrip() for line in lines), ""]


def _text(value: Any) -> str:
    """A value as a reader wants it: four digits of a float."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _cell(value: Any) -> str:
    text = _text(value)
    plain = text.replace("|", "\\|").replace("\n", " ")
    return (
        f"`{plain}`"
        if any(sign in text for sign in "*_<[{")
        and not plain.startswith("[")
        and "`" not in plain
        and "] " not in plain
        and not text.endswith("]")
        else plain
    )
