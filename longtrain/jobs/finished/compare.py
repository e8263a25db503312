"""`longtrain eval compare=[RUN_A,RUN_B]`: compare two finished runs without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import files as files_
from longtrain import provenance, tables
from longtrain.errors import ConfigError
from longtrain.settings import Count, convert

if TYPE_CHECKING:
    from longtrain.config import RunConfig


def run(cfg: RunConfig) -> None:
    """Compare the runs of `compare`; write compare.json, compare.md and, if requested, compare.html.

    Raises:
        ConfigError: not two runs, or runs of another suite or protocol.
        DataError: a damaged file of a run.
    """
    from longtrain.evaluation.analysis import compare
    from longtrain.evaluation.analysis.statistics import RESAMPLES, Bootstrap
    from longtrain.evaluation.reporting.comparisons import compare_summary, compare_table
    from longtrain.evaluation.reporting.page import compare_page

    resamples = cfg.suite.values.get("bootstrap")
    resamples = RESAMPLES if resamples is None else convert(resamples, Count, "suite.bootstrap")
    first, second = compare.load(folders_of(cfg.evaluation.compare, cfg.home))
    found = compare.compare(first, second, Bootstrap(cfg.seed, resamples))
    files = {"compare.json": files_.as_json(found), "compare.md": compare_table(found).encode()}
    if cfg.evaluation.page:
        files["compare.html"] = compare_page(found)
    folder = cfg.run_dir / "compare" / folder_name(first.label, second.label)
    files_.write_files(folder, files)
    provenance.write(folder, cfg.values, protocol=found["protocol"]["hash"])
    tables.show(*compare_summary(found))
    tables.print_lines(
        "difference: the second run minus the first; * where larger than noise",
        *(f"note: {note}" for note in found["notes"]),
        *(f"{name}: {folder / name}" for name in files),
    )


def folder_name(first: str, second: str) -> str:
    """The folder name `A_vs_B`; each pair of runs has its own folder."""
    return "_vs_".join(re.sub(r"[^\w.@+-]+", "-", label).strip("-.") or "run" for label in (first, second))


def folders_of(given: Any, home: Path) -> list[Path]:
    """The folders of the two runs to compare.

    Args:
        given: `compare=` as typed; a bare name refers to a run of `home`.
        home: the folder that holds `runs`.

    Raises:
        ConfigError: not a list of two, or a folder does not exist.
    """
    asked = convert([given] if isinstance(given, str) else given, list[str], "compare")
    if len(asked) != 2:
        raise ConfigError(
            f"compare={given} names {len(asked)} of them; allowed: two, as compare=[RUN_A,RUN_B], each a "
            "run's name or its folder"
        )
    found = []
    for name in asked:
        places = [Path(name), home / "runs" / name]
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise ConfigError(f"compare: there is no run {name} (looked at {places[0]} and {places[1]})")
        found.append(there)
    return found
