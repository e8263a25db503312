"""What a run and its data are called where the command does not say it, and what came of a sweep's runs.

A run is called by its recipe, else by what it runs; the runs of a sweep have their values behind that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.files import read_json
from longtrain.jobs.setup import artifact_names
from longtrain.tables import DASH, number, show

if TYPE_CHECKING:
    from omegaconf import DictConfig

UNNAMED = "run"
"""The `name` of a command that sets none."""
LONGEST = 100
"""Characters of a name; a sweep with longer values numbers its runs."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Args:
        name: of the run.
        values: what is swept -> its value in this run, as typed.
        run_dir: the folder of its outputs.
        failed: whether an error ended it.
    """

    name: str
    values: Mapping[str, str]
    run_dir: Path
    failed: bool = False


def usual_name(cfg: DictConfig, choices: Mapping[str, str | None]) -> str:
    """The name of a command that sets none: its recipe, else its method or artifacts and its target.

    Args:
        cfg: the resolved configuration.
        choices: group -> the option that is chosen.
    """
    if choices.get("recipe"):
        return str(choices["recipe"])
    what = [str(cfg.method.name)] if cfg.method else [Path(one).name for one in artifact_names(cfg)]
    return _safe("_".join([*what, *_target(cfg, choices)])) or UNNAMED


def _target(cfg: DictConfig, choices: Mapping[str, str | None]) -> list[str]:
    path, option = str(cfg.target.path or "") if cfg.target else "", choices.get("target")
    if not path:
        return []
    return [str(option)] if option not in (None, "local") else [Path(path).name]


def data_name(cfg: DictConfig) -> str | None:
    """The name of prepared data of one's own files: `text` of `books/a.txt` is `text_books_a`.

    None for other data, and where the command sets another name.
    """
    name = str(cfg.data.name) if cfg.data and "name" in cfg.data else ""
    where = cfg.data.get(name) if name else None
    if not isinstance(where, str) or not where:
        return None
    path = Path(where)
    parts = [*path.parts[-2:-1], path.name.partition(".")[0] or path.name]
    return _safe("_".join([name, *parts]))


def swept(words: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """What a sweep varies -> its value in one run.

    Args:
        words: overrides of the command line.
        given: overrides of the run.
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
    """A text that is in Hydra's quotes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return str(OverridesParser.create().parse_override(f"x={value}").value())


def swept_name(name: str, values: Mapping[str, str], number_: int) -> str:
    """The name of a run of a sweep: its values, or its number where they are long."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in values.items()]
    found = _safe("_".join([name, *parts]))
    return found if parts and len(found) <= LONGEST else f"{name}_{number_}"


def summarise(runs: Sequence[SweptRun]) -> None:
    """Print a line for each run of a sweep: its values, what came of it, and where it is."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    found = [_figures(run.run_dir) for run in runs]
    figures = list(dict.fromkeys(key for one in found for key in one if one[key] is not None))
    rows = [
        [
            *(run.values.get(key, DASH) for key in keys),
            "failed" if run.failed else "done",
            *(number(one.get(key)) for key in figures),
            str(run.run_dir),
        ]
        for run, one in zip(runs, found, strict=True)
    ]
    show([*keys, "run", *figures, "folder"], rows, title="The sweep's runs")


def _figures(run_dir: Path) -> dict[str, Any]:
    """The main figures that training and evaluations left in a run's folder."""
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
    """A text as the name of a folder."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")
