"""Formats tables in Markdown and on the terminal, and the numbers in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

DASH = "-"
"""Cell of a missing value."""
BARS = "▁▂▃▄▅▆▇█"


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def of_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a Markdown table of measurements.

    Args:
        rows: one mapping for each line.
        columns: heading -> key; a dotted key looks into a nested mapping. Columns without any value are
            dropped.
    """
    found = {head: [value_at(row, key) for row in rows] for head, key in columns.items()}
    used = [head for head, values in found.items() if any(value is not None for value in values)]
    return markdown(used, [[number(found[head][i]) for head in used] for i in range(len(rows))])


def show(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table without truncating it; terminal control characters are escaped.

    On a terminal that is too narrow, the columns are split into several blocks, each with the first column.
    Output to a file is a single block.
    """
    from rich.console import Console
    from rich.table import Table

    header, rows = [printable(cell) for cell in header], [[printable(cell) for cell in row] for row in rows]
    console = Console(highlight=False, markup=False)
    widths = [2 + max(map(len, map(str, column))) for column in zip(header, *rows, strict=True)]
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=max(80, sum(widths)))
    for place, block in enumerate(blocks(widths, console.width)):
        name = None if place or title is None else printable(title)
        table = Table(box=None, header_style="bold", title=name, title_justify="left")
        for at in block:
            table.add_column(header[at], no_wrap=True)
        for row in rows:
            table.add_row(*(row[at] for at in block))
        console.print(Trimmed(table))


class Trimmed:
    """A rich renderable without trailing spaces, so that text copied from a terminal has none.

    Args:
        drawn: anything that rich can print.
    """

    def __init__(self, drawn: RenderableType) -> None:
        self.drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines; called by rich."""
        from rich.segment import Segment

        for line in console.render_lines(self.drawn, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            if line:
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split columns into blocks that fit a line; return the column indices of each, the first column in all.

    Args:
        widths: width of each column, in characters.
        room: width of a line.
    """
    found, used = [[0]], widths[0]
    for at, width in enumerate(widths[1:], 1):
        if used + width > room and len(found[-1]) > 1:
            found.append([0])
            used = widths[0]
        found[-1].append(at)
        used += width
    return found


def print_lines(*lines: str) -> None:
    """Print lines without wrapping them; control characters other than newlines are escaped."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print("\n".join(map(printable, line.split("\n"))))


def printable(text: Any) -> str:
    """Return text in one line with control characters escaped, since it may quote a file's content."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def escaped(text: Any) -> str:
    """Escape text for a cell of a Markdown table."""
    shown = " ".join(str(text).split())
    return re.sub(r"[\\`*\[\]<>|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", shown)  # a_b is not emphasis


def number(value: Any) -> str:
    """Format a value: numbers with three significant digits, thousands as integers, a dash for None."""
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Draw a curve as one line of block characters, from the lowest value (thin) to the highest (full)."""
    groups = min(width, len(values))
    bounds = [len(values) * i // groups for i in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / ((high - low) or 1))] for mean in means)


def percent(share: float | None) -> str:
    """Format a share as `12.3%`."""
    return DASH if share is None else f"{100 * share:.1f}%"


def tokens(count: int) -> str:
    """Format a token count: 1024 -> 1k, 1536 -> 1.5k, 300 -> 300."""
    return f"{count / 1024:g}k" if count >= 1024 and count % 128 == 0 else str(count)


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return a measurement's value under a key; a dotted key looks into nested mappings. None if missing."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
