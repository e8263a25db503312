"""What a card says of a run beside its weights: curves, results that used these weights, pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.artifact.card import TRAINING
from longtrain.artifact.evidence import Curve, Evidence, Measurement
from longtrain.assets import MANIFEST
from longtrain.errors import LongtrainError, first_line
from longtrain.files import read_json, read_results
from longtrain.log import get_logger
from longtrain.provenance import commit_of, machine_of, typed_command, without_folders
from longtrain.targets.at_hand import CARD
from longtrain.targets.info import source_line

if TYPE_CHECKING:
    from longtrain.artifact import Artifact

log = get_logger(__name__)

CURVES = ("loss", "accuracy", "tau", "recall", "r2")
"""What the names of the curves that are kept contain, beside all of validation's."""


def gather(run_dir: Path, weights: str) -> tuple[Evidence, dict[str, bytes]]:
    """The curves and results of a run, and its pictures by their names on the card.

    Args:
        run_dir: the run's folder.
        weights: hash of the artifact's tensors, or of a target's: results of other weights are left out.
    """
    pictures: dict[str, bytes] = {}
    if (curves := run_dir / "train" / "curves.png").is_file():
        pictures[TRAINING] = curves.read_bytes()
    results = []
    for folder in sorted((run_dir / "eval").glob("*")):
        if not (folder / "results.json").exists():
            continue
        try:
            found = read_results(folder / "results.json")
            if not _used(found, weights):
                continue
            measured = partial(_measured, folder, found)
            measured([])
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            log.warning("left_out=%s reason=its files are damaged (%s)", folder, first_line(error))
            continue
        drawn = {f"{folder.name}-{file.name}": file.read_bytes() for file in sorted(folder.glob("*.png"))}
        pictures |= drawn
        results.append(measured([*drawn]))
    return Evidence(curves_of(run_dir / "train" / "metrics.csv"), results), pictures


def refresh(home: Path, run_dir: Path, artifacts: Iterable[Artifact]) -> None:
    """Write the cards of artifacts below `home` anew, with what a run has measured.

    What a card has of other runs stays, and artifacts in other places are left alone. A folder that cannot be
    written to is told, and is no error: the files of the evaluation have everything.

    Args:
        home: the folder that holds `checkpoints`.
        run_dir: the run's folder.
        artifacts: which the run used.
    """
    own = home / "checkpoints"
    for artifact in artifacts:
        folder = artifact.folder
        if folder is None or not _below(folder, own) or not (folder / MANIFEST).is_file():
            continue  # one that ships with longtrain, is of the Hub, or of another tool
        try:
            known, (found, pictures) = Evidence.of_folder(folder), gather(run_dir, artifact.checksum())
            fresh = {(one.suite, one.protocol) for one in found.results}
            kept = [one for one in known.results if (one.suite, one.protocol) not in fresh]
            artifact.describe(
                Evidence({**known.curves, **found.curves}, [*kept, *found.results]), pictures=pictures
            )
            log.info("card=%s results=%d", folder / CARD, len(kept) + len(found.results))
        except (OSError, LongtrainError) as error:
            log.warning("the card of artifact %s was not written anew: %s", folder, error)


def _below(folder: Path, own: Path) -> bool:
    """Whether a folder is below another, a link there to a place elsewhere included."""
    return own.absolute() in folder.absolute().parents or own.resolve() in folder.resolve().parents


def _used(results: dict[str, Any], weights: str) -> bool:
    """Whether a system of an evaluation, or its target, had these weights."""
    if results["target"].get("weights_hash") == weights:
        return True
    used = [one["weights"] for system in results["systems"] for one in system["facts"].get("artifacts", [])]
    if used and weights not in used:
        log.info("left_out=%s reason=measured with other weights", results["suite"])
    return weights in used


def _measured(folder: Path, results: dict[str, Any], pictures: list[str]) -> Measurement:
    """An evaluation as the card shows it; of folders of this machine only the last part is left."""
    from longtrain.evaluation.reporting.comparisons import card_table

    made = _read(folder / "provenance.json") or {}
    header, rows = card_table(results, _read(folder / "timings.json"))
    argv = without_folders(made.get("argv") or [])
    return Measurement(
        suite=str(results["suite"]),
        title=str(results["title"]),
        target=_named(results["target"]),
        dtype=str(results["target"]["dtype"]),
        protocol=str(results["protocol"]["hash"]),
        command=typed_command(argv) if argv else "",
        commit=commit_of(made),
        machine=machine_of(made),
        notes=[str(note) for note in results["notes"]],
        header=header,
        rows=rows,
        pictures=pictures,
    )


def _named(target: dict[str, Any]) -> str:
    """Name of an evaluation's target, and which weights it had."""
    said = source_line(target.get("source", {}))
    return str(without_folders(target["name"])) + (f" ({said})" if said else "")


def curves_of(metrics: Path) -> dict[str, Curve]:
    """The curves of a training run that are shown, by name, from its `metrics.csv`."""
    from longtrain.training import table

    points: dict[str, list[tuple[int, float]]] = {}
    for row in table.read(metrics):
        for name, value in row.items():
            if _shown(name) and value and math.isfinite(float(value)):
                points.setdefault(name, []).append((int(row["step"]), float(value)))
    return {
        name: Curve([step for step, _ in found], [value for _, value in found]).thinned()
        for name, found in points.items()
    }


def _shown(name: str) -> bool:
    kind, _, figure = name.partition("/")
    return kind == "val" or (kind == "train" and any(figure.startswith(word) for word in CURVES))


def _read(path: Path) -> Any:
    """A JSON file of ours; None where there is none or a kill left it damaged."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None
