"""A report as a list of parts, which can be written as Markdown, as HTML, or on the terminal."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtrain import tables
from longtrain.tables import DASH, escaped

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: the displayed text; may be untrusted, such as a system's name.
        beside: an interval or a range next to the text; numbers only.
        strong: highlight the cell, because a difference is larger than noise.
        value: the number that an HTML page sorts by; None: sort by text.
    """

    text: str
    beside: str = ""
    strong: bool = False
    value: float | None = None

    def plain(self) -> str:
        """The cell on a terminal, with a star if it is highlighted."""
        return f"{self.text}{'*' if self.strong else ''} {self.beside}".rstrip()

    def markdown(self) -> str:
        """The cell in Markdown, bold if it is highlighted."""
        shown = escaped(self.text)
        return f"{f'**{shown}**' if self.strong else shown} {self.beside}".rstrip()

    def html(self) -> str:
        """The cell as an element of an HTML table."""
        shown = html.escape(self.text)
        shown = f"<b>{shown}</b>" if self.strong else shown
        beside = f' <span class="range">{html.escape(self.beside)}</span>' if self.beside else ""
        order = "" if self.value is None else f' data-value="{self.value:g}"'
        return f"<td{order}>{shown}{beside}</td>"


Column = tuple[str, Callable[[Any], Cell | str]]
"""A heading, and a function from an entry to its cell; a plain string stands for a cell with that text."""


def columns_of(
    keys: Iterable[Any], cell: Callable[[Any, Any], Cell | str], heading: Callable[[Any], str] = str
) -> list[Column]:
    """Make a column for each key.

    Args:
        keys: for example tasks, metrics or context lengths.
        cell: (entry, key) -> the entry's cell in the column of that key.
        heading: key -> the heading of its column.
    """

    def column(key: Any) -> Column:
        return heading(key), lambda entry: cell(entry, key)

    return [column(key) for key in keys]


@dataclass(frozen=True)
class ReportTable:
    """A table with its title.

    Args:
        title: empty for a table directly below the report's own title.
        header: the headings of the columns.
        rows: lines with one cell for each heading.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @classmethod
    def of(cls, title: str, columns: Sequence[Column], entries: Iterable[Any]) -> ReportTable:
        """Build the table that its columns describe, one line for each entry."""
        rows = [[_cell(cell(entry)) for _, cell in columns] for entry in entries]
        return cls(title, [heading for heading, _ in columns], rows)

    def without_empty(self, *, kept: Sequence[int] = (0,)) -> ReportTable:
        """A copy without columns that contain only dashes; the columns with the indices `kept`
        always stay.
        """
        used = [
            at
            for at in range(len(self.header))
            if at in kept or any(row[at].text != DASH for row in self.rows)
        ]
        rows = [[row[at] for at in used] for row in self.rows]
        return ReportTable(self.title, [self.header[at] for at in used], rows)

    def plain(self) -> tuple[list[str], list[list[str]]]:
        """Headings and lines as strings, for a terminal (`longtrain.tables.show`) or an artifact's card."""
        return list(self.header), [[cell.plain() for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """The table in Markdown; empty if it has no lines."""
        if not self.rows:
            return ""
        shown = tables.markdown(
            [escaped(heading) for heading in self.header],
            [[cell.markdown() for cell in row] for row in self.rows],
        )
        return f"## {escaped(self.title)}\n\n{shown}" if self.title else shown

    def html(self) -> str:
        """The table as HTML; empty if it has no lines."""
        if not self.rows:
            return ""
        title = f"<h2>{html.escape(self.title)}</h2>\n" if self.title else ""
        head = "".join(
            f'<th scope="col"><button type="button">{html.escape(heading)}</button></th>'
            for heading in self.header
        )
        body = "\n".join(f"<tr>{''.join(cell.html() for cell in row)}</tr>" for row in self.rows)
        return (
            f'{title}<div class="card scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>"
        )


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or the report's title."""

    text: str
    title: bool = False

    def markdown(self) -> str:
        """The paragraph in Markdown."""
        return f"# {escaped(self.text)}" if self.title else escaped(self.text)

    def html(self) -> str:
        """The paragraph as HTML."""
        shown = html.escape(self.text)
        return f"<h1>{shown}</h1>" if self.title else f"<p>{shown}</p>"


@dataclass(frozen=True)
class Bullets:
    """A bullet list, with an optional title."""

    lines: Sequence[str]
    title: str = ""

    def markdown(self) -> str:
        """The list in Markdown; empty if it has no items."""
        shown = "\n".join(f"- {escaped(line)}" for line in self.lines)
        return f"## {self.title}\n\n{shown}" if self.title and shown else shown

    def html(self) -> str:
        """The list as HTML; empty if it has no items."""
        if not self.lines:
            return ""
        title = f"<h2>{html.escape(self.title)}</h2>\n" if self.title else ""
        return f"{title}<ul>\n{''.join(f'<li>{html.escape(line)}</li>' for line in self.lines)}\n</ul>"


Part = ReportTable | Paragraph | Bullets


def to_markdown(parts: Iterable[Part]) -> str:
    """A report in Markdown."""
    return "\n\n".join(filter(None, (part.markdown() for part in parts))) + "\n"


def to_html(parts: Iterable[Part]) -> str:
    """A report as HTML elements; untrusted text is escaped."""
    return "\n".join(filter(None, (part.html() for part in parts)))


def rounded(value: float, digits: int | None, sign: str = "") -> str:
    """A number with `digits` decimals; None: with three significant digits.

    Args:
        value: the number.
        digits: number of decimals.
        sign: `+` shows the sign of positive numbers too.
    """
    return f"{value:{sign}.3g}" if digits is None else f"{value:{sign}.{digits}f}"


def interval(value: Json | None, digits: int | None = 2) -> Cell | str:
    """A value with its interval (none if there are too few examples), or a dash if there is no value.

    `digits` as in `rounded`, also in the functions below.
    """
    if value is None or value["value"] is None:
        return DASH
    return Cell(rounded(value["value"], digits), bounds(value, digits), value=value["value"])


def difference(versus: Json | None, *, digits: int | None = 2) -> Cell | str:
    """A signed difference with its interval, highlighted only where it is larger than noise."""
    if versus is None or versus["difference"]["value"] is None:
        return DASH
    gap, strong = versus["difference"], bool(versus["larger_than_noise"])
    return Cell(rounded(gap["value"], digits, "+"), bounds(gap, digits), strong, gap["value"])


def bounds(value: Json, digits: int | None = 2) -> str:
    """The interval of a value, such as `[2.40, 2.63]`; empty if it has none."""
    if value["low"] is None:
        return ""
    return f"[{rounded(value['low'], digits)}, {rounded(value['high'], digits)}]"


def number(value: float | None, digits: int = 2) -> Cell | str:
    """A number rounded to `digits` decimals."""
    return DASH if value is None else Cell(f"{value:.{digits}f}", value=value)


def percent(share: float | None) -> Cell | str:
    """A share in percent."""
    return DASH if share is None else Cell(tables.percent(share), value=share)


def _cell(shown: Cell | str) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown)
