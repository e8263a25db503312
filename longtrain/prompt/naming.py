"""Default names of runs and their data, and the summary of a sweep's runs.

A run is named after its recipe, else after its method and target; runs of a sweep get their values as suffix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.files import read_json
from longtrain.tables import DASH, number, show

if TYPE_CHECKING:
    from longtrain.config import RunConfig

UNNAMED = "run"
"""The `name` of a command that sets none."""
LONGEST = 100
"""Maximum length of a name; a sweep with longer values numbers its runs."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Args:
        name: the run's name.
        values: swept key -> its value in this run, as typed.
        run_dir: the run's output folder.
        failed: True if an error ended it.
    """

    name: str
    values: Mapping[str, str]
    run_dir: Path
    failed: bool = False


def usual_name(cfg: RunConfig, choices: Mapping[str, str | None]) -> str:
    """The default name of a run: its recipe, else its method or artifacts and its target.

    Args:
        cfg: the configuration.
        choices: group -> the selected option.
    """
    if choices.get("recipe"):
        return str(choices["recipe"])
    what = [cfg.method.name] if cfg.method else [Path(one).name for one in cfg.artifacts]
    return _safe("_".join([*what, *_target(cfg, choices)])) or UNNAMED


def _target(cfg: RunConfig, choices: Mapping[str, str | None]) -> list[str]:
    path, option = str((cfg.values.get("target") or {}).get("path") or ""), choices.get("target")
    if not path:
        return []
    return [str(option)] if option not in (None, "local") else [Path(path).name]


def data_name(cfg: RunConfig) -> str | None:
    """The name of data prepared from a user's own files: `text` from `books/a.txt` is `text_books_a`.

    None for other data, or if the command sets a name.
    """
    name = str(cfg.data_values.get("name", ""))
    where = cfg.data_values.get(name) if name else None
    if not isinstance(where, str) or not where:
        return None
    path = Path(where)
    parts = [*path.parts[-2:-1], path.name.partition(".")[0] or path.name]
    return _safe("_".join([name, *parts]))


def swept(words: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Swept key -> its value in one run.

    Args:
        words: the overrides of the command line.
        given: the overrides of the run.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    typed = OverridesParser.create().parse_overrides(
        [word for word in words if word[:1] != "-" and "=" in word]
    )
    keys = [one.key_or_group for one in typed if one.is_sweep_override()]
    values = dict(word.lstrip("+").split("=", 1) for word in given if "=" in word)
    plain = {key: values[key] for key in keys if key in values}
    return {key: _unquoted(value) if value[:1] in ("'", '"') else value for key, value in plain.items()}


def _unquoted(value: str) -> str:
    """Remove Hydra's quotes from a text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return str(OverridesParser.create().parse_override(f"x={value}").value())


def swept_name(name: str, values: Mapping[str, str], number_: int) -> str:
    """The name of a sweep's run: its values, or its number if they are long."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in values.items()]
    found = _safe("_".join([name, *parts]))
    return found if parts and len(found) <= LONGEST else f"{name}_{number_}"


def summarise(runs: Sequence[SweptRun]) -> None:
    """Print a line for each run of a sweep: its values, its result, and its folder."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    found = [_metrics(run.run_dir) for run in runs]
    metrics = list(dict.fromkeys(key for one in found for key in one if one[key] is not None))
    rows = [
        [
            *(run.values.get(key, DASH) for key in keys),
            "failed" if run.failed else "done",
            *(number(one.get(key)) for key in metrics),
            str(run.run_dir),
        ]
        for run, one in zip(runs, found, strict=True)
    ]
    show([*keys, "run", *metrics, "folder"], rows, title="The sweep's runs")


def _metrics(run_dir: Path) -> dict[str, Any]:
    """The main results of training and evaluations in a run's folder."""
    found: dict[str, Any] = {}
    if (file := run_dir / "train" / "summary.json").is_file():
        summary = read_json(file)
        found = {"loss": summary["final_loss"], "val loss": summary["final"].get("val/loss")}
    for file in sorted((run_dir / "eval").glob("*/results.json")):
        for system in read_json(file)["systems"]:
            found[f"{file.parent.name} {system['name']}"] = system["average"]["value"]
            if system["acceptance"]:
                found[f"τ {system['name']}"] = system["acceptance"]["tau"]["value"]
    return found


def _safe(text: str) -> str:
    """Convert a text to a valid folder name."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")
