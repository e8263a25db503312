"""Messages of the package's errors: what each says is wrong, what it says to do, and where it is raised."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import NamedTuple

from repository import ROOT

LEAST_WORDS = 12
"""Letters that a message has beside the values in it; shorter ones are parts of others."""

AREAS = {
    "Settings and the command line": (
        "settings",
        "prompt",
        "cli",
        "files",
        "folders",
        "journals",
        "assets",
        "jobs",
    ),
    "The target": ("targets", "features", "layers", "pickled"),
    "Data": ("data", "chunked", "losses"),
    "Training and checkpoints": ("training",),
    "Methods": ("methods",),
    "Artifacts and the Hub": ("artifact",),
    "Decoding, caches and kernels": ("decoding", "cache", "kernels"),
    "Evaluation and benchmarks": ("systems", "evaluation", "bench", "costs", "plots", "tables"),
}
"""Headings, and the folders and modules of `longtrain/` whose errors stand below them."""

_SHAPED = {"wrong": "{}={}; allowed: {}", "refusal": "{1}; allowed: {2}"}
"""Functions that make an error of their arguments, and the words that they make."""


class Message(NamedTuple):
    """One message, with `...` for values: what is wrong, what to do ("": it does not say), and its file."""

    words: str
    remedy: str
    source: str


@cache
def raised() -> tuple[Message, ...]:
    """Every error that `longtrain` raises with a text of its own."""
    found = []
    for file in sorted((ROOT / "longtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = _text(node.exc) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else ""
            words, _, remedy = text.partition("; ")
            if len(words.replace("...", "").strip()) >= LEAST_WORDS:
                found.append(Message(words, remedy, file.relative_to(ROOT).as_posix()))
    return tuple(dict.fromkeys(found))


def area(source: str) -> str:
    """The heading of a file's messages.

    Raises:
        LookupError: the file belongs to no area.
    """
    part = source.split("/")[1].removesuffix(".py")
    for name, parts in AREAS.items():
        if part in parts:
            return name
    raise LookupError(f"{source} raises errors, and docs/generate/messages.py has no area for '{part}'")


def table() -> str:
    """All messages as Markdown tables, one for each area."""
    areas: dict[str, list[Message]] = {name: [] for name in AREAS}
    for message in raised():
        areas[area(message.source)].append(message)
    lines = []
    for name, found in areas.items():
        lines += [
            f"### {name}",
            "",
            "| what is wrong | what is allowed, or what to do | raised in |",
            "|---|---|---|",
        ]
        for words, remedy, source in sorted(found, key=lambda one: one.words.lstrip(".:'= ").casefold()):
            cells = (_plain(words), _plain(remedy), f"`{source.removeprefix('longtrain/')}`")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


@cache
def texts() -> frozenset[str]:
    """Every text in the sources of `longtrain`, with `...` for values."""
    files = (ROOT / "longtrain").rglob("*.py")
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return frozenset(_words(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))


def _text(call: ast.Call) -> str:
    """The words of the error that a call makes; empty where it makes none with words of its own."""
    name = ast.unparse(call.func)
    if name in _SHAPED:
        return re.sub(r"(\.\.\.)+", "...", _SHAPED[name].format(*map(_words, call.args)))
    return _words(call.args[0]) if name.endswith(("Error", "Missing")) and call.args else ""


def _words(node: ast.expr) -> str:
    """The text of a message; values that are put in are `...`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"(\.\.\.)+", "...", "".join(_words(part) for part in node.values))
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    return "..."


def _plain(words: str) -> str:
    """Words as Markdown that shows them as they are."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", words).replace("\n", " ").removesuffix("; ...")
