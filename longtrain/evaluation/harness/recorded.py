"""Recorded scores of the full cache: a run whose score differs has an error, such as a missing chat template.

They are in two files: `results/baselines.json` of the recipes that ship, and `baselines.json` in `home`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtrain.assets import asset_dir
from longtrain.errors import DataError, LongtrainError
from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.harness.protocol import Protocol, json_hash
from longtrain.evaluation.harness.results_journal import first_difference
from longtrain.evaluation.suite import AGREEMENT, DIVERGENCE, Scale, Suite
from longtrain.evaluation.task import Task
from longtrain.files import as_json, lock, read_json, write_files
from longtrain.log import get_logger
from longtrain.systems import FULL_CACHE

log = get_logger(__name__)

Json = dict[str, Any]
FILE = "baselines.json"
FIELDS = ("suite", "weights_hash", "rows", "protocol", "score", "low", "high", "source")
HOW = "suite.check_baseline=false runs all the same, and the result has a note"


@dataclass(frozen=True)
class Baselines:
    """Recorded scores of the full cache.

    Args:
        entries: the entries of both files, those from `home` first.
        path: the file in `home`, to which `record` adds.
    """

    entries: tuple[Json, ...]
    path: Path

    @classmethod
    def load(cls, home: Path) -> Baselines:
        """Read both files if they exist.

        Raises:
            DataError: a file is damaged.
        """
        own, shipped = home / FILE, asset_dir("recipes") / "results" / FILE
        return cls((*_read(own), *_read(shipped)), own)

    def find(self, suite: Suite, weights_hash: str, protocol: Protocol) -> Json | None:
        """The recorded entry for these weights, examples and protocol; None if there is none.

        Raises:
            LongtrainError: only scores with other protocols are recorded.
        """
        rows = rows_of(suite, protocol)
        known = [
            entry
            for entry in self.entries
            if (entry["suite"], entry["weights_hash"], entry["rows"]) == (suite.name, weights_hash, rows)
        ]
        for entry in known:
            if Protocol(entry["protocol"]).hash == protocol.hash:
                return entry
        if not known:
            return None
        key, had, now = first_difference(known[0]["protocol"], protocol.settings)
        raise LongtrainError(
            f"suite {suite.name} is recorded on this target and these examples with another protocol; {key}: "
            f"recorded {had}, now {now}; set it as it was, or record this protocol too (suite.record=true); "
            f"{HOW}"
        )

    def record(self, suite: Suite, weights_hash: str, protocol: Protocol, average: Json) -> Json:
        """Add a score to the file in `home`, replacing an older one of the same protocol.

        Args:
            suite: the suite that was run.
            weights_hash: hash of the target's weights.
            protocol: the protocol of the run.
            average: `value`, `low` and `high` of the full cache's score.
        """
        entry = {
            "suite": suite.name,
            "weights_hash": weights_hash,
            "rows": rows_of(suite, protocol),
            "protocol": protocol.settings,
            "score": average["value"],
            "low": average["low"],
            "high": average["high"],
            "source": "home",
        }
        with lock(self.path.with_name(f".{self.path.name}.lock"), wait=True):
            kept = [old for old in _read(self.path) if _place(old) != _place(entry)]
            write_files(self.path.parent, {self.path.name: as_json({"baselines": [*kept, entry]})})
        return entry


def rows_of(suite: Suite, protocol: Protocol) -> str:
    """Hash of a suite's examples, independent of how they are prompted."""
    tasks = protocol.settings["tasks"]
    return json_hash({task.name: tasks[task.name].get("rows_sha256") for task in suite.tasks})


def exempt(suite: Suite) -> str:
    """The reason why a suite has no full-cache score to compare, or an empty string if it has one."""
    if suite.scale.name == ACCEPTANCE:
        return "plain decoding gives one token a forward whatever the target, so there is nothing to compare"
    if suite.scale.name in (AGREEMENT, DIVERGENCE):
        return "the full cache agrees with itself whatever the target, so there is nothing to compare"
    if not suite.full_cache:
        return "the full cache is not run, so there is nothing to compare"
    return ""


def compare(suite: Suite, entry: Json, measured: float) -> Json:
    """Compare a score of the full cache with the recorded one.

    The same examples decoded greedily give the same answers up to rounding, so a point is allowed. If answers
    are sampled, half the recorded interval is allowed if that is more.

    Returns: `status` equal, `recorded`, `measured`, `tolerance`, `source`.

    Raises:
        LongtrainError: the difference exceeds the tolerance.
    """
    tolerance = _point(suite.scale, entry["score"])
    if _sampled(suite, entry["protocol"]) and entry["low"] is not None:  # a single example has no interval
        tolerance = max(tolerance, (entry["high"] - entry["low"]) / 2)
    verdict = {
        "status": "equal",
        "recorded": entry["score"],
        "measured": measured,
        "tolerance": tolerance,
        "source": entry["source"],
    }
    if abs(measured - entry["score"]) > tolerance:
        raise LongtrainError(
            f"the full cache scores {measured:.2f} in suite {suite.name}, and {entry['score']:.2f} is "
            f"recorded for this very protocol ({entry['source']}), more than {tolerance:.2f} away; "
            f"weights, kernels or libraries are not what they were; no other system was run; {HOW}"
        )
    return verdict


def unchecked(status: str, measured: float | None = None, reason: str = "") -> Json:
    """The verdict if nothing was compared: status `none` (not recorded), `off`, `no_score`, or `recorded`
    (just now).
    """
    return {"status": status, "measured": measured, **({"reason": reason} if reason else {})}


def log_verdict(suite: Suite, verdict: Json) -> None:
    """Log one line about a verdict."""
    if verdict["status"] == "none":
        log.info(
            "baseline=none suite=%s full_cache=%.2f (suite.record=true records it for later runs)",
            suite.name,
            verdict["measured"],
        )
    elif verdict["status"] in ("equal", "recorded"):
        log.info("baseline=%s suite=%s full_cache=%.2f", verdict["status"], suite.name, verdict["measured"])


def average_of(results: Json) -> Json | None:
    """`value`, `low`, `high` of the full cache in assembled results; None if it has no score."""
    full = next(system for system in results["systems"] if system["name"] == FULL_CACHE.name)
    average = full["average"]
    return average if average and average.get("value") is not None else None


def _sampled(suite: Suite, protocol: Json) -> bool:
    """True if any answer is sampled; the protocol's temperature applies to tasks that set none."""
    default = protocol["decoding"]["temperature"]
    own = [task.temperature for task in suite.tasks if isinstance(task, Task)]
    return any((default if temperature is None else temperature) > 0 for temperature in own)


def _point(scale: Scale, recorded: float) -> float:
    """One hundredth of the scale's maximum, or of the recorded score if the scale has no maximum."""
    return (scale.maximum if scale.maximum is not None else abs(recorded)) / 100


def _place(entry: Json) -> Sequence[Any]:
    return [entry["suite"], entry["weights_hash"], entry["rows"], Protocol(entry["protocol"]).hash]


def _read(path: Path) -> list[Json]:
    if not path.is_file():
        return []
    try:
        entries = read_json(path)["baselines"]
        for entry in entries:
            missing = [key for key in FIELDS if key not in entry]
            if missing:
                raise KeyError(missing[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read: {error!r}; repair or remove it (scores are then recorded anew by "
            "suite.record=true)"
        ) from None
    return list(entries)
