"""Metrics of a run as a CSV file that survives kills, and as a plot.

Lines are appended whole; a new column rewrites the file atomically.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from longtrain import files, plots
from longtrain.errors import DataError, LongtrainError, TrainingError, first_line

NUMBERED = re.compile(r"(?:[_/@.-](?:depth|d)[_/]?|[_/@.-]?)\d+$")
"""Suffix of a metric's name that numbers it within its family."""
SMOOTH = 0.02
"""Width of the running mean, as a share of the steps."""


class Table:
    """A CSV table with a line per step. Columns are in order of first appearance; missing values are empty.

    Args:
        path: the file; its content is kept until `cut`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def cut(self, step: int) -> None:
        """Keep the lines up to and including a step, without a last line that a kill left unfinished."""
        rows = [row for row in read(self.path) if int(row["step"]) <= step]
        self.columns = list(rows[0]) if rows else []
        if rows:
            self._rewrite(rows)
        else:
            self.path.unlink(missing_ok=True)

    def append(self, rows: Iterable[Mapping[str, float | int]]) -> None:
        """Append lines; each has a `step`.

        Raises:
            TrainingError: the disk is full or the file cannot be written.
        """
        rows = list(rows)
        fresh = [key for row in rows for key in row if key not in self.columns]
        texts = [{key: _text(value) for key, value in row.items()} for row in rows]
        if fresh:
            old = read(self.path)
            self.columns += list(dict.fromkeys(fresh))
            self._rewrite([*old, *texts])
            return
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(_lines(self.columns, texts))
        except OSError as error:
            raise self._failed(error) from error

    def sync(self) -> None:
        """Flush the table to disk, before a checkpoint that relies on it."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        header = dict(zip(self.columns, self.columns, strict=True))
        try:
            files.write_text(self.path, _lines(self.columns, [header, *rows]))
        except LongtrainError as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> TrainingError:
        reason = getattr(error, "strerror", None) or error
        return TrainingError(
            f"cannot write figures to {self.path}: {reason}; make room or set home=FOLDER, "
            f"then run the same command again to resume"
        )


def read(path: Path) -> list[dict[str, str]]:
    """Read the complete lines of a table, as text; a last line without its end is left out."""
    if not path.exists():
        return []
    try:
        text = files.read_text(path)
        whole = text[: text.rfind("\n") + 1]
        rows = csv.DictReader(io.StringIO(whole, newline=""))
        return [row for row in rows if None not in row and None not in row.values() and row["step"].isdigit()]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise DataError(
            f"{path} is damaged ({first_line(error)}); move it away, and it is begun anew"
        ) from None


def family(name: str) -> str:
    """Return a metric's name without its number in the family: `acc/depth_0`, `acc_1` -> `acc`."""
    return NUMBERED.sub("", name)


def draw(metrics: Path, picture: Path, title: str = "") -> bool:
    """Plot one panel for the loss and one for each family of metrics (`acc_1`, `acc_2` share one), as a PNG.

    Args:
        metrics: `metrics.csv` of a run.
        picture: the PNG to write.
        title: above all curves.

    Returns:
        False when there is nothing to draw.
    """
    rows = read(metrics)
    if not rows:
        return False
    families: dict[str, list[str]] = {}
    for name in rows[0]:
        if name.startswith(("train/", "val/")):
            families.setdefault(family(name.split("/", 1)[1]), []).append(name)
    figure, panels = plots.panels(len(families), columns=3, size=(4.6, 3.1))
    for axes, (stem, members) in zip(panels, families.items(), strict=True):
        for name in members:
            points = [(int(row["step"]), float(row[name])) for row in rows if row[name] not in ("", "nan")]
            steps, values = [step for step, _ in points], [value for _, value in points]
            if name.startswith("train/"):
                values = _running_mean(values, max(1, int(SMOOTH * len(values))))
            marker = "o" if name.startswith("val/") else ""
            axes.plot(steps, values, label=name, linewidth=1.2, marker=marker, markersize=3)
        plots.label(axes, "optimizer step", title=stem, legend=len(members) > 1)
    files.write_files(picture.parent, {picture.name: plots.png(figure, title=title)})
    return True


def _lines(columns: list[str], rows: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _text(value: float | int) -> str:
    """Format a float with every digit, so that equal text means equal bits."""
    return repr(float(value)) if isinstance(value, float) else str(value)


def _running_mean(values: list[float], width: int) -> list[float]:
    """Return the mean of the last `width` values at each place."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    ]
