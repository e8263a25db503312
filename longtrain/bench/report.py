"""What a benchmark leaves: a JSON with the machine and the versions it ran on, and a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtrain import files, provenance
from longtrain.bench.clock import gib, spread
from longtrain.costs.hardware import GIB

__all__ = ["GIB", "gib", "shorter", "spread", "table", "write"]


def write(folder: Path, name: str, *, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `NAME.json`: settings, environment and one entry a measurement; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"suite": name, "settings": dict(settings), **provenance.gather(), "rows": [*rows]}
    files.write_text(path, json.dumps(content, indent=2) + "\n")
    return path


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A markdown table.

    Args:
        rows: what to show; a key may be dotted to reach into a mapping. Missing values show as `-`.
        columns: heading -> key.
    """
    body = [[_cell(_find(row, key)) for key in columns.values()] for row in rows]
    lines = [list(columns), ["---"] * len(columns), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _find(row: Mapping[str, Any], key: str) -> Any:
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def shorter(value: Any) -> str:
    """A value for people: numbers to three digits, thousands whole."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _cell(value: Any) -> str:
    return "-" if value is None else shorter(value)
