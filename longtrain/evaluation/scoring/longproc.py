"""F1 of table lines, as LongProc scores html_to_tsv."""

from __future__ import annotations

import csv
import re

from longtrain.evaluation.scoring.longbench import without_articles

FENCED = re.compile(r"```tsv([\s\S]*)```")
MISSING = "N/A"


def html_to_tsv(prediction: str, reference: str) -> float:
    """F1 of the lines of the table in an answer and in the reference, 0 to 1.

    A table row is right if some row of the other table equals it in every column, columns matched by
    position; the order of rows does not matter and each repeated row counts. The headers are not compared.
    Tables with a different number of columns, without rows, with two columns of one name or that the csv
    reader refuses score 0.

    Args:
        prediction: the whole answer; see `extract_tsv`.
        reference: the right table.

    Source: LongProc, `eval_html_to_tsv`.
    """
    try:
        expected, predicted = _rows(reference), _rows(extract_tsv(prediction))
    except csv.Error:
        return 0.0
    if not expected or not predicted or len(expected[0]) != len(predicted[0]):
        return 0.0
    precision = _share(predicted, expected)
    recall = _share(expected, predicted)
    both = recall + precision
    return 2 * recall * precision / both if both else 0.0


def extract_tsv(text: str) -> str:
    """Extract the table from an answer: between "```tsv" and the last "```", else after "```tsv", else all of
    it.
    """
    fenced = FENCED.search(text)
    if fenced:
        return fenced[1].strip()
    return (text.split("```tsv")[1] if "```tsv" in text else text).strip()


def _rows(text: str) -> list[tuple[str, ...]]:
    """Normalised cells of each row below the header; none if two columns have one name."""
    header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    if rows and len(rows[-1]) != len(header):
        del rows[-1]  # closing words or an end marker
    if len(set(header)) < len(header):
        return []
    whole = [row if len(row) == len(header) else [MISSING] * len(header) for row in rows]
    return [tuple(_normalise(cell) for cell in row) for row in whole]


def _normalise(cell: str) -> str:
    return "".join(without_articles(cell).split())


def _share(rows: list[tuple[str, ...]], others: list[tuple[str, ...]]) -> float:
    """Share of `rows` that are among `others`."""
    known = set(others)
    return sum(row in known for row in rows) / len(rows)
