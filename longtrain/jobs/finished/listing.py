"""`longtrain list`: artifacts, training runs and evaluations below `home`, one line each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import tables
from longtrain.assets import MANIFEST
from longtrain.evaluation.reporting.document import Cell, ReportTable, interval
from longtrain.files import json_sha256, read_json_if_whole, read_results
from longtrain.provenance import read_config

if TYPE_CHECKING:
    from longtrain.config import RunConfig

Row = list[str]
HEADER = ("name", "method", "target", "when", "verified", "main result")
UNREADABLE = "cannot be read"
OF_TRAINING = ("config.yaml", "provenance.json", "checkpoints")
"""Entries of which a training run's folder has at least one."""


def run(cfg: RunConfig) -> None:
    """Print a line for each artifact, run and evaluation below `home`, the newest first.

    Nothing is loaded or written. Damaged files are reported in their line and raise no error.
    """
    home = cfg.home.expanduser()
    measured: dict[str, str] = {}
    evaluations = sorted(_evaluations(home, measured), key=_newest, reverse=True)
    found = {
        "Artifacts": sorted(_artifacts(home, measured), key=_newest, reverse=True),
        "Training runs": sorted(_trained(home), key=_newest, reverse=True),
        "Evaluations": evaluations,
    }
    for title, rows in found.items():
        if rows:
            table = ReportTable("", HEADER, [[Cell(text) for text in row] for row in rows])
            tables.show(*table.without_empty().plain(), title=title)
            tables.print_lines("")
    if not any(found.values()):
        tables.print_lines(
            f"nothing was trained, exported or evaluated below {home} yet; begin: "
            "longtrain +recipe=quickstart"
        )
        return
    tables.print_lines(
        "more: longtrain inspect NAME, longtrain eval compare=[RUN,RUN]; elsewhere: home=FOLDER"
    )


def _newest(row: Row) -> str:
    return row[HEADER.index("when")]


def _artifacts(home: Path, measured: dict[str, str]) -> Iterator[Row]:
    """One line for each folder with a manifest, including members of a joint training.

    Args:
        home: the folder that holds `checkpoints`.
        measured: hash of an artifact's tensors -> main result of an evaluation in which it ran.
    """
    base = home / "checkpoints"
    for file in sorted(base.glob(f"**/{MANIFEST}")):
        folder, name = file.parent, file.parent.relative_to(base).as_posix()
        manifest = read_json_if_whole(file)
        try:
            made, files = manifest["provenance"], manifest["files"]
            when = (made.get("export") or made).get("time_utc", "")
            result = measured.get(str(next(iter(files.values()))), "") or _evidence_result(folder)
            target, verified = str(manifest["target"]["name"]), _verified(folder, files, manifest)
            yield [name, str(manifest["method"]), target, _when(when), verified, result or "not evaluated"]
        except (KeyError, TypeError, AttributeError, StopIteration):
            yield [name, tables.DASH, tables.DASH, tables.DASH, f"NO: {file.name} {UNREADABLE}", tables.DASH]


def _verified(folder: Path, files: dict[str, str], manifest: dict[str, Any]) -> str:
    """Verification status of an artifact's files against its manifest; golden outputs are not recomputed."""
    if faults := (manifest.get("verification") or {}).get("faults"):
        return f"NO: {faults[0]}"
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != json_sha256(content):
        return f"NO: {MANIFEST} was changed"
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            return f"NO: {name} is missing"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                return f"NO: {name} was changed"
    golden = manifest.get("golden")
    return f"files yes; golden outputs in {golden['dtype']}" if golden else "files yes; no golden outputs"


def _evidence_result(folder: Path) -> str:
    """The last result in an artifact's own `evidence.json`, excluding the full cache's."""
    try:
        for one in (read_json_if_whole(folder / "evidence.json") or {})["results"]:
            rows = [row for row in one["rows"] if row[0] != "full"]
            if rows:
                return f"{one['header'][1]} {rows[-1][1]} ({rows[-1][0]}, suite {one['suite']})"
    except (KeyError, TypeError, IndexError):
        pass
    return ""


def _trained(home: Path) -> Iterator[Row]:
    """One line for each training run: its last step and loss."""
    runs = home / "runs"
    for folder in sorted({file.parent for file in runs.glob("**/train/*") if file.name in OF_TRAINING}):
        try:
            cfg = read_config(folder)
            method = str(cfg["method"]["name"])
            target = str(cfg["target"]["path"] if cfg.get("target") else tables.DASH)
        except (OSError, ValueError, KeyError, TypeError):
            method = target = tables.DASH
        made, summary = (
            read_json_if_whole(folder / "provenance.json"),
            read_json_if_whole(folder / "summary.json"),
        )
        when = _when(made.get("time_utc", "") if isinstance(made, dict) else "")
        result = "not finished; the same command goes on"
        if isinstance(summary, dict) and summary.get("steps"):
            final = summary.get("final")
            val_loss = final.get("val/loss") if isinstance(final, dict) else None
            losses = {"loss": summary.get("final_loss"), "val_loss": val_loss}
            shown = [f"{key} {value:.3f}" for key, value in losses.items() if isinstance(value, float)]
            result = ", ".join([f"step {summary['steps']}", *shown])
        name = folder.parent.relative_to(runs).as_posix()
        yield [name, method, target, when, tables.DASH, result]


def _evaluations(home: Path, measured: dict[str, str]) -> Iterator[Row]:
    """One line for each evaluated suite; fills `measured` with the result of each artifact."""
    runs = home / "runs"
    files = runs.glob("**/eval/*/results.json")
    for file in sorted(files, key=lambda file: file.lstat().st_mtime):  # an artifact's newest result stays
        name = f"{file.parents[2].relative_to(runs).as_posix()}/{file.parent.name}"
        made = read_json_if_whole(file.with_name("provenance.json"))
        when = _when(made.get("time_utc", "") if isinstance(made, dict) else "")
        try:
            results = read_results(file)
            systems, scale = results["systems"], results["scale"]["name"]
            others = [one for one in systems if one["kind"] != "full"]
            for one in others:
                for artifact in one["facts"].get("artifacts", []):
                    measured[str(artifact["weights"])] = f"{_metric(scale, one)}, suite {results['suite']}"
            methods = dict.fromkeys(
                artifact["method"] for one in others for artifact in one["facts"].get("artifacts", [])
            )
            of_artifacts = [one for one in others if one["facts"].get("artifacts")]
            last = (of_artifacts or others or systems)[-1]
            target = str(results["target"]["name"])
            yield [
                name,
                ", ".join(methods) or tables.DASH,
                target,
                when,
                _compared(others),
                _metric(scale, last),
            ]
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            yield [name, tables.DASH, tables.DASH, when, f"NO: {file.name} {UNREADABLE}", tables.DASH]


def _metric(scale: str, system: dict[str, Any]) -> str:
    value = interval(system["average"])
    return f"{scale} {value.plain() if isinstance(value, Cell) else value} ({system['name']})"


def _compared(systems: list[dict[str, Any]]) -> str:
    """Number of drafted sequences, over all systems, that equal plain decoding's."""
    found = [task["exactness"] for one in systems for task in one["tasks"] if task.get("exactness")]
    count = sum(one["compared"] for one in found)
    return (
        f"{count - sum(one['different'] for one in found)}/{count} texts the same" if count else tables.DASH
    )


def _when(stamp: str) -> str:
    """A file's time stamp in UTC, to the minute."""
    try:
        return datetime.fromisoformat(stamp).astimezone(UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, TypeError):
        return tables.DASH
