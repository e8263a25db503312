"""Tables for people, in Markdown and on the terminal, and how figures are written in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

DASH = "-"
"""What stands where there is no figure."""
BARS = "▁▂▃▄▅▆▇█"


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def of_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, all_columns: bool = False
) -> str:
    """A Markdown table of measurements.

    Args:
        rows: one mapping a line.
        columns: heading -> key; a dotted key reaches into a mapping.
        all_columns: keep columns without any value; else they are left out.
    """
    found = {head: [value_at(row, key) for row in rows] for head, key in columns.items()}
    used = [
        head for head, values in found.items() if all_columns or any(value is not None for value in values)
    ]
    return markdown(used, [[number(found[head][i]) for head in used] for i in range(len(rows))])


def without_empty(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, kept: Sequence[int] = (0,)
) -> tuple[list[str], list[list[str]]]:
    """Header and rows without the columns that hold dashes alone.

    Args:
        header: of the table.
        rows: of the table.
        kept: numbers of the columns that stay in any case.
    """
    used = [i for i in range(len(header)) if i in kept or any(row[i] != DASH for row in rows)]
    return [header[i] for i in used], [[row[i] for i in used] for row in rows]


def show(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table; nothing of it is cut, and what a terminal would obey is escaped.

    On a terminal that is too narrow, or where COLUMNS says so, the columns come in several blocks, each with
    the first column. A file has them all in one.
    """
    from rich.console import Console
    from rich.table import Table

    header, rows = [printable(cell) for cell in header], [[printable(cell) for cell in row] for row in rows]
    console = Console(highlight=False, markup=False)
    widths = [2 + max(map(len, map(str, column))) for column in zip(header, *rows, strict=True)]
    if not console.is_terminal and "COLUMNS" not in os.environ:
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
    """What rich draws, without the blanks that fill its lines: a copy from a terminal, or a file, has none.

    Args:
        drawn: anything that rich prints.
    """

    def __init__(self, drawn: RenderableType) -> None:
        self.drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's way to ask for the lines."""
        from rich.segment import Segment

        for line in console.render_lines(self.drawn, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            if line:
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of the columns that go side by side; the first column is in every block.

    Args:
        widths: of the columns.
        room: of a line.
    """
    found, used = [[0]], widths[0]
    for at, width in enumerate(widths[1:], 1):
        if used + width > room and len(found[-1]) > 1:
            found.append([0])
            used = widths[0]
        found[-1].append(at)
        used += width
    return found


def say(*lines: str) -> None:
    """Print lines on the terminal, wrapped by it alone; of what it would obey, only new lines stay."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print("\n".join(map(printable, line.split("\n"))))


def printable(text: Any) -> str:
    """Text in one line; what a terminal would obey (a file's content may be in it) is shown escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def escaped(text: Any) -> str:
    """Text that cannot end a cell of a Markdown table or become markup."""
    shown = " ".join(str(text).split())
    return re.sub(r"[\\`*\[\]<>|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", shown)  # a_b is no emphasis


def number(value: Any) -> str:
    """A value for people: numbers to three digits, thousands whole, a dash for nothing."""
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def fixed(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point."""
    return DASH if value is None else f"{value:.{digits}f}"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A curve in one line of characters, the lowest value as a thin bar and the highest as a full one."""
    groups = min(width, len(values))
    bounds = [len(values) * i // groups for i in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / ((high - low) or 1))] for mean in means)


def percent(share: float | None) -> str:
    """`12.3%`."""
    return DASH if share is None else f"{100 * share:.1f}%"


def tokens(count: int) -> str:
    """1024 -> 1k, 1536 -> 1.5k, 300 -> 300."""
    return f"{count / 1024:g}k" if count >= 1024 and count % 128 == 0 else str(count)


def interval(value: Mapping[str, Any] | None, digits: int = 2) -> str:
    """`2.51 [2.40, 2.63]`, `2.51` where too few examples are behind it for an interval, or a dash."""
    if value is None or value["value"] is None:
        return DASH
    if value["low"] is None:
        return f"{value['value']:.{digits}f}"
    return f"{value['value']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """A measurement's value under a key; a dotted key reaches into a mapping. None where there is none."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
