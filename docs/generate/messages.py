"""Messages of the package's errors, and the tests that raise them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from repository import ROOT

LEAST_WORDS = 12
"""Letters that a test's pattern and a message must share."""


class Message(NamedTuple):
    """One message: its words, with `...` for values, the file that raises it and a test that shows it."""

    words: str
    source: str
    test: str


@cache
def raised() -> tuple[tuple[str, str], ...]:
    """Words and file of each error that `longtrain` raises with a text of its own."""
    found = []
    for file in sorted((ROOT / "longtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                words = _words(node.exc.args[0])
                name = ast.unparse(node.exc.func)
                if (
                    name.endswith(("Error", "Missing"))
                    and len(words.replace("...", "").strip()) >= LEAST_WORDS
                ):
                    found.append((words, file.relative_to(ROOT).as_posix()))
    return tuple(dict.fromkeys(found))


@cache
def patterns() -> tuple[tuple[str, str], ...]:
    """What `pytest.raises(..., match=...)` expects, as plain words, with the test's file."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "match" and isinstance(node.value, ast.Constant):
                found += [
                    (words, file.relative_to(ROOT).as_posix()) for words in _plain(str(node.value.value))
                ]
    return tuple(found)


def shown() -> Iterator[Message]:
    """Messages that a test raises: its words stand in no other file's messages, or it imports that file."""
    places: dict[str, set[str]] = {}
    for part, _ in patterns():
        places.setdefault(part, {source for words, source in raised() if part in words})
    for words, source in raised():
        module = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for part, test in sorted(patterns(), key=lambda one: -len(one[0])):
            if part in words and (len(places[part]) == 1 or f"{module} import" in _text(test)):
                yield Message(words, source, test)
                break


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def table() -> str:
    """All messages that tests raise, as a Markdown table by the part of the package that raises them."""
    rows = sorted(shown(), key=lambda one: (one.source, one.words))
    parts: dict[str, list[Message]] = {}
    for row in rows:
        parts.setdefault(Path(row.source).parts[1].removesuffix(".py"), []).append(row)
    lines = []
    for part, found in parts.items():
        lines += [f"### {part}", "", "| message | raised in | shown by |", "|---|---|---|"]
        for row in found:
            source, test = row.source.removeprefix("longtrain/"), row.test.removeprefix("tests/")
            lines.append(f"| {_code(row.words)} | `{source}` | `{test}` |")
        lines.append("")
    return "\n".join(lines)


def _words(node: ast.expr) -> str:
    """The text of a message; values that are put in are `...`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"(\.\.\.)+", "...", "".join(_words(part) for part in node.values))
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    return "..."


def _plain(pattern: str) -> list[str]:
    """The runs of plain words in a regular expression that are long enough to know a message by."""
    text = re.sub(r"\\([^\w])", lambda found: f"\0{ord(found[1]):04d}", pattern)
    runs = re.split(
        r"\.\*|\.\+|[()|\[\]^$?*+\\]|\\\w|\d+",
        re.sub(
            r"\0(\d{4})",
            lambda found: chr(int(found[1])) if chr(int(found[1])) not in "()|[]^$?*+" else "\n",
            text,
        ),
    )
    return [run for part in runs for run in part.split("\n") if len(run.strip()) >= LEAST_WORDS]


def _code(words: str) -> str:
    text = words.replace("|", "\\|").replace("\n", " ")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
