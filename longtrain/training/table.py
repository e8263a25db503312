"""A CSV file of figures that survives kills: rows are appended whole, new columns rewrite it atomically."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from longtrain import files
from longtrain.errors import LongtrainError, TrainingError


class Table:
    """Rows by step. Columns stand in the order in which names first come up; a missing figure is empty.

    Args:
        path: the file; what it holds already is kept until `cut`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def cut(self, step: int) -> None:
        """Keep the rows up to and including a step, and forget a line that a kill left unfinished."""
        rows = [row for row in read(self.path) if int(row["step"]) <= step]
        self.columns = list(rows[0]) if rows else []
        if rows:
            self._rewrite(rows)
        else:
            self.path.unlink(missing_ok=True)

    def append(self, rows: Iterable[Mapping[str, float | int]]) -> None:
        """Add rows; each has a `step`.

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
        """Have the rows on the disk before a checkpoint that counts on them."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            header = dict(zip(self.columns, self.columns, strict=True))
            files.write_text(self.path, _lines(self.columns, [header, *rows]))
        except OSError as error:
            raise self._failed(error) from error
        except LongtrainError as error:
            raise self._failed(error.__cause__ or error) from error

    def _failed(self, error: BaseException) -> TrainingError:
        reason = getattr(error, "strerror", None) or error
        return TrainingError(
            f"cannot write figures to {self.path}: {reason}; make room or set home=FOLDER, "
            f"then run the same command again to resume"
        )


def read(path: Path) -> list[dict[str, str]]:
    """The whole rows of a table, as text; a last line without its end is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(whole, newline=""))
    return [row for row in rows if None not in row and None not in row.values() and row["step"].isdigit()]


def _lines(columns: list[str], rows: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _text(value: float | int) -> str:
    """Every digit of a float, so that equal text means equal bits."""
    return repr(float(value)) if isinstance(value, float) else str(value)
