"""One page of many finished evaluations: leaderboard.md, leaderboard.html and leaderboard.json."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from longtrain import files, tables
from longtrain.errors import ConfigError
from longtrain.jobs.setup import plain
from longtrain.settings import convert


def run(cfg: DictConfig) -> None:
    """Write the page of the evaluations that `cfg.runs` names, in `leaderboard` of the run's folder.

    Raises:
        ConfigError: no folder, or one without results.
        DataError: a damaged file of an evaluation.
    """
    from longtrain.evaluation.reporting.leaderboard import leaderboard, load, page_text
    from longtrain.evaluation.reporting.page import board_page

    made = leaderboard(load(folders_of(cfg)))
    written = {
        "leaderboard.md": page_text(made).encode(),
        "leaderboard.html": board_page(made),
        "leaderboard.json": files.as_json(made),
    }
    folder = Path(cfg.run_dir) / "leaderboard"
    files.write_files(folder, written)
    for group in made["groups"]:
        title = f"{group['number']}. {group['title']}: {group['target']}, {group['dtype']}"
        tables.show(group["header"], group["rows"], title=title)
        tables.say(*(f"note: {note}" for note in group["notes"]), "")
    for one in made["apart"]:
        tables.say(f"{one['first']} and {one['second']} may not be compared: {'; '.join(one['because'])}")
    tables.say(*(f"{name}: {folder / name}" for name in written))


def folders_of(cfg: DictConfig) -> list[Path]:
    """The folders that are named; a bare name is one of `home`'s runs.

    Raises:
        ConfigError: none is named, or one is not there.
    """
    given = plain(cfg.runs)
    names = convert([given] if isinstance(given, str) else given or [], list[str], "runs")
    if not names:
        raise ConfigError(
            "nothing to list; pass runs or folders of runs: longtrain leaderboard runs/A runs/B"
        )
    found = []
    for name in names:
        places = [Path(name).expanduser(), Path(cfg.home) / "runs" / name]
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise ConfigError(f"there is no run {name} (looked at {places[0]} and {places[1]})")
        found.append(there)
    return found


def check(cfg: DictConfig) -> None:
    """Refuse folders that are not there."""
    folders_of(cfg)
