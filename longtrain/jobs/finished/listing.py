"""What there is below `home`: training runs, artifacts and evaluations, a line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtrain import tables
from longtrain.assets import MANIFEST, bundled_artifacts
from longtrain.errors import LongtrainError
from longtrain.files import read_json

UNREADABLE = "cannot be read"
"""What stands where a file of a run is damaged."""


def show_all(home: Path) -> None:
    """Print the tables of runs, artifacts and evaluations; what is damaged has a line too."""
    runs, evaluations = _runs(home / "runs"), _evaluations(home / "runs")
    if runs:
        tables.show(["run", "method", "target", "when", "loss", "val loss"], runs, title="Training runs")
    header = ["artifact", "method", "target", "when", "verifies"]
    tables.show(header, _artifacts(home / "checkpoints"), title="Artifacts")
    if evaluations:
        header = ["run", "suite", "target", "when", "system", "score", "τ"]
        tables.show(header, evaluations, title="Evaluations")
    if not (runs or evaluations):
        tables.say(
            f"no run below {home / 'runs'}; begin with: longtrain demo, or longtrain +recipe=quickstart"
        )
    tables.say("more of one artifact: longtrain inspect NAME")


def _runs(folder: Path) -> list[list[str]]:
    rows = []
    for file in sorted(folder.glob("*/train/provenance.json")):
        summary = _read(file.with_name("summary.json"))
        values, final = _config(file.parent), summary.get("final") or {}
        loss = tables.number(summary.get("final_loss")) if summary else "not finished"
        losses = [loss, tables.number(final.get("val/loss"))]
        rows.append([file.parent.parent.name, _method(values), _target(values), _when(_read(file)), *losses])
    return rows


def _artifacts(folder: Path) -> list[list[str]]:
    """Artifacts of one's own, those of joint training by their members, and those that ship here."""
    own = sorted([*folder.glob(MANIFEST), *folder.glob(f"*/{MANIFEST}"), *folder.glob(f"*/*/{MANIFEST}")])
    named = {file.parent.relative_to(folder).as_posix(): file.parent for file in own}
    shipped = {f"{name} (ships here)": place for name, place in bundled_artifacts().items()}
    return [_artifact(name, place) for name, place in {**named, **shipped}.items()]


def _artifact(name: str, place: Path) -> list[str]:
    from longtrain.artifact.inspection import inspect

    manifest = _read(place / MANIFEST)
    target, made = manifest.get("target") or {}, manifest.get("provenance") or {}
    try:
        fault = inspect(str(place)).fault
    except LongtrainError as error:
        fault = str(error)
    told = [str(manifest.get("method", UNREADABLE)), Path(str(target.get("name", tables.DASH))).name]
    return [name, *told, _when(made), f"NO: {fault}" if fault else "yes"]


def _evaluations(folder: Path) -> list[list[str]]:
    rows = []
    for file in sorted(folder.glob("*/eval/*/results.json")):
        place, values = file.parent, _config(file.parent)
        about = [
            place.parent.parent.name,
            place.name,
            _target(values),
            _when(_read(place / "provenance.json")),
        ]
        systems = _read(file).get("systems") or [{"name": UNREADABLE}]
        for system in systems:
            figures = [tables.value_at(system, key) for key in ("average.value", "acceptance.tau.value")]
            rows.append([*about, str(system.get("name")), *map(tables.number, figures)])
    return rows


def _read(file: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where it is missing or damaged."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _config(folder: Path) -> Mapping[str, Any]:
    """The configuration that a job has left beside its output; nothing where it cannot be read."""
    import yaml

    try:
        found = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _method(values: Mapping[str, Any]) -> str:
    return str((values.get("method") or {}).get("name") or tables.DASH)


def _target(values: Mapping[str, Any]) -> str:
    return Path(str((values.get("target") or {}).get("path") or tables.DASH)).name


def _when(made: Mapping[str, Any]) -> str:
    """Date and time, UTC, to the minute."""
    return str(made.get("time_utc") or tables.DASH)[:16].replace("T", " ")
