"""`longtrain eval compare=[RUN_A,RUN_B]`: two finished runs against each other, nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

from omegaconf import DictConfig

from longtrain import files as files_
from longtrain import provenance, tables
from longtrain.errors import ConfigError
from longtrain.jobs.setup import plain
from longtrain.settings import Count, convert, wrong


def run(cfg: DictConfig) -> None:
    """Compare the runs that `cfg.compare` names; write compare.json, compare.md and, if asked, compare.html.

    They are in `compare/A_vs_B` of the run's folder.

    Raises:
        ConfigError: not two runs, or runs of another suite or protocol.
        DataError: a damaged file of a run.
    """
    from longtrain.evaluation.figures import compare
    from longtrain.evaluation.figures.statistics import RESAMPLES, Bootstrap
    from longtrain.evaluation.reporting.comparisons import compare_summary, compare_table
    from longtrain.evaluation.reporting.page import compare_page

    folders, page = folders_of(cfg), wants_page(cfg)
    resamples = convert(plain(cfg.suite).get("bootstrap", RESAMPLES), Count, "suite.bootstrap")
    first, second = compare.load(folders)
    found = compare.compare(first, second, Bootstrap(convert(cfg.seed, int, "seed"), resamples))
    files = {"compare.json": files_.as_json(found), "compare.md": compare_table(found).encode()}
    if page:
        files["compare.html"] = compare_page(found)
    folder = Path(cfg.run_dir) / "compare" / folder_name(first.label, second.label)
    files_.write_files(folder, files)
    provenance.write(folder, plain(cfg), protocol=found["protocol"]["hash"])
    tables.show(*compare_summary(found))
    tables.say(
        "difference: the second run minus the first; * where larger than noise",
        *(f"note: {note}" for note in found["notes"]),
        *(f"{name}: {folder / name}" for name in files),
    )


def wants_page(cfg: DictConfig) -> bool:
    """Whether a page is written beside Markdown and JSON: `report=html`.

    Raises:
        ConfigError: another kind of report.
    """
    if cfg.report not in (None, "html"):
        raise wrong("report", cfg.report, "html, or null (Markdown and JSON alone)")
    return bool(cfg.report)


def folder_name(first: str, second: str) -> str:
    """`A_vs_B`: two other runs are compared in a folder of their own."""
    return "_vs_".join(re.sub(r"[^\w.@+-]+", "-", label).strip("-.") or "run" for label in (first, second))


def folders_of(cfg: DictConfig) -> list[Path]:
    """The two folders to compare; a bare name is one of `home`'s runs.

    Raises:
        ConfigError: not a list of two, or one that is not there.
    """
    given = cfg.compare if isinstance(cfg.compare, str) else plain(cfg.compare)
    asked = convert([given] if isinstance(given, str) else given, list[str], "compare")
    if len(asked) != 2:
        raise ConfigError(
            f"compare={given} names {len(asked)} of them; allowed: two, as compare=[RUN_A,RUN_B], each a "
            "run's name or its folder"
        )
    found = []
    for name in asked:
        places = [Path(name), Path(cfg.home) / "runs" / name]
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise ConfigError(f"compare: there is no run {name} (looked at {places[0]} and {places[1]})")
        found.append(there)
    return found
