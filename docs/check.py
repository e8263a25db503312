"""Compare what the documentation states with what it was taken from.

`python docs/check.py` prints every difference and exits with 1; `--write` first refreshes settings and
signatures. What it compares:

    <!-- recipes/results/FILE.json     numbers in the text above, one a line, and where they stand in the file
    2.79 = variants[name=main chain 4].lengths[length=2048].tau.value     (also 72%, 34.1 MB, 32.9 GiB)
    -->
    <!-- settings: longspec -->        before the table of a method's settings
    <!-- signature: module.name -->    before the Python block with a function's signature
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from longtrain.prompt.help import method_settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "recipes").rglob("*.md")]
UNITS = {"": 1, "%": 100, " MB": 1e-6, " GB": 1e-9, " GiB": 2**-30}
REFERENCE = re.compile(r"<!-- (recipes/results/\S+\.json)\n(.*?)-->", re.S)
VALUE = re.compile(r"(\{+[^{}]*\}+)+")
GENERATED = re.compile(r"(<!-- (settings|signature): (\S+) -->\n)(.*?)(?=\n\n|\n*\Z)", re.S)


def at(value: Any, place: str) -> Any:
    """Return what stands at a place of a JSON value, such as `runs[name=main].rows[0].ms`."""
    for key, condition in re.findall(r"([^.\[\]]+)|\[([^\]]+)\]", place):
        if key:
            value = value[key]
        elif condition.isdigit():
            value = value[int(condition)]
        else:
            wanted = [part.split("=", 1) for part in condition.split(",")]
            (value,) = (one for one in value if all(str(one.get(name)) == said for name, said in wanted))
    return value


def wrong_numbers(text: str) -> Iterator[str]:
    """Yield referenced numbers that differ from their JSON or are not in the text above the reference."""
    end, typed = 0, Counter[str]()
    for match in REFERENCE.finditer(text):
        if between := text[end : match.start()].strip():  # several references can share the text above them
            typed = Counter(re.findall(r"\d[\d,]*(?:\.\d+)?", between))
        end = match.end()
        for line in match[2].splitlines():
            try:
                shown, place = line.split(" = ", 1)
                number, unit = re.fullmatch(r"(-?[\d,]*\.?\d+)(.*)", shown).groups()  # type: ignore[union-attr]
                value = at(json.loads((ROOT / match[1]).read_text(encoding="utf-8")), place) * UNITS[unit]
            except (AttributeError, LookupError, ValueError, TypeError, OSError) as error:
                yield f"{match[1]}: {line}: {error!r}"
                continue
            rounding = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
            if abs(value - float(number.replace(",", ""))) > rounding:
                yield f"{shown} is {value} in {match[1]}: {place}"
            typed[number.lstrip("-")] -= 1
            if typed[number.lstrip("-")] < 0:
                yield f"{shown} ({place}) is not in the text above its reference"


def generated(kind: str, name: str) -> str:
    """Return the Markdown of a method's settings or of a function's signature."""
    if kind == "settings":
        rows = [(key, default, said.replace("|", "\\|")) for key, default, said in method_settings(name)]
        lines = [f"| `method.{key}` | `{default}` | {said} |" for key, default, said in rows]
        return "\n".join(["| key | default | what it does |", "|---|---|---|", *lines])
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(pkgutil.resolve_name(name)))).body
    assert isinstance(node, ast.FunctionDef) and node.returns
    between = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
    lines = re.split(r", (?=\*|\w+(?::|=))", between) if len(between) > 80 else [between]
    inside = "\n    " + ",\n    ".join(lines) + ",\n" if len(lines) > 1 else between
    return f"```python\n{node.name}({inside}) -> {ast.unparse(node.returns)}\n```"


@cache
def sources() -> str:
    """Return the sources of `longtrain` with texts that span lines joined and values in texts as `...`."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "longtrain").rglob("*.py"))
    return VALUE.sub("...", re.sub(r'"\s*\n\s*f?"', "", text))


def wrong(page: Path) -> Iterator[str]:
    """Yield what a page states that is not so."""
    text = page.read_text(encoding="utf-8")
    yield from wrong_numbers(text)
    if len(re.findall("<!--", text)) != len(REFERENCE.findall(text)) + len(GENERATED.findall(text)):
        yield "a comment is no reference, settings or signature as docs/check.py reads them"
    for _, kind, name, shown in GENERATED.findall(text):
        if shown != generated(kind, name):
            yield f"the {kind} of {name} have changed: python docs/check.py --write"
    if page.name == "troubleshooting.md":
        for message in re.findall(r"^\| `([^`]+)` \|", text, re.M):
            if VALUE.sub("...", message) not in sources():
                yield f"no error says '{message}'"


if __name__ == "__main__":
    if "--write" in sys.argv:
        for page in PAGES:
            old = page.read_text(encoding="utf-8")
            page.write_text(GENERATED.sub(lambda m: m[1] + generated(m[2], m[3]), old), encoding="utf-8")
    found = [f"{page.relative_to(ROOT)}: {one}" for page in PAGES for one in wrong(page)]
    sys.exit("\n".join(found) or 0)
