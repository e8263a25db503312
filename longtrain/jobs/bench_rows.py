"""What the benches of single operators share: measure row by row, keep what is there, show a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from longtrain import provenance
from longtrain.bench import report
from longtrain.jobs import plain


def show(
    cfg: DictConfig, name: str, measured: Iterable[dict[str, Any]], columns: Mapping[str, str]
) -> tuple[Path, list[dict[str, Any]]]:
    """Write `NAME.json` again whenever there is a new row, then print the table.

    Args:
        cfg: of the run; settings that were wrong have been refused.
        name: of the file.
        measured: rows as they come.
        columns: heading -> key of a row.

    Returns:
        the file and its rows.
    """
    folder = Path(cfg.run_dir) / "bench"
    provenance.write(folder, plain(cfg))
    rows: list[dict[str, Any]] = []
    path = folder / f"{name}.json"
    for row in measured:
        rows.append(row)
        path = report.write(folder, name, settings=plain(cfg.suite), rows=rows)
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, columns), markup=False)
    console.print(f"wrote {path}", markup=False)
    return path, rows
