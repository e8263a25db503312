"""Evidence on a model card beside the weights: training curves, results with these weights, pictures."""

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
from longtrain.files import read_json_if_whole, read_results
from longtrain.log import get_logger
from longtrain.provenance import commit_of, machine_of, typed_command, without_folders
from longtrain.targets.at_hand import CARD
from longtrain.targets.info import source_line

if TYPE_CHECKING:
    from longtrain.artifact import Artifact

log = get_logger(__name__)

CURVES = ("loss", "accuracy", "tau", "recall", "r2")
"""Beginnings of the names of the training curves that are kept; all of validation's are."""


def gather(run_dir: Path, weights: str) -> tuple[Evidence, dict[str, bytes]]:
    """Collect the curves and results of a run, and its pictures by their names on the card.

    Args:
        run_dir: the run's folder.
        weights: hash of the artifact's (or a target's) tensors; results of other weights are excluded.
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
    """Rewrite the cards of artifacts below `home` with the run's new measurements.

    Results of other runs stay on the card, and artifacts outside `home` are not touched. A folder that cannot
    be written to is logged, not an error: the evaluation's files contain everything.

    Args:
        home: the folder that holds `checkpoints`.
        run_dir: the run's folder.
        artifacts: the artifacts that the run used.
    """
    own = home / "checkpoints"
    for artifact in artifacts:
        folder = artifact.folder
        if folder is None or not _below(folder, own) or not (folder / MANIFEST).is_file():
            continue  # an artifact that ships with longtrain, or is from the Hub or another tool
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
    """True if a folder is below another; links are resolved."""
    return own.absolute() in folder.absolute().parents or own.resolve() in folder.resolve().parents


def _used(results: dict[str, Any], weights: str) -> bool:
    """True if a system of an evaluation, or its target, had these weights."""
    if results["target"].get("weights_hash") == weights:
        return True
    used = [one["weights"] for system in results["systems"] for one in system["facts"].get("artifacts", [])]
    if used and weights not in used:
        log.info("left_out=%s reason=measured with other weights", results["suite"])
    return weights in used


def _measured(folder: Path, results: dict[str, Any], pictures: list[str]) -> Measurement:
    """An evaluation as shown on the card; only the last part of local paths is kept."""
    from longtrain.evaluation.reporting.comparisons import card_table

    made = read_json_if_whole(folder / "provenance.json") or {}
    header, rows = card_table(results, read_json_if_whole(folder / "timings.json"))
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
    """The name of an evaluation's target, and a hash of its weights."""
    source = source_line(target.get("source", {}))
    return str(without_folders(target["name"])) + (f" ({source})" if source else "")


def curves_of(metrics: Path) -> dict[str, Curve]:
    """The displayed curves of a training run, by name, from its `metrics.csv`."""
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
    kind, _, metric = name.partition("/")
    return kind == "val" or (kind == "train" and any(metric.startswith(word) for word in CURVES))
