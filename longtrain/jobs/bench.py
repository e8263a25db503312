"""`longtrain bench`: measure speed or memory on this machine, write JSON and pictures, show a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import files, provenance
from longtrain.jobs.setup import convert, device_of, drafting_from, load_target_from, plain, sampling_from
from longtrain.log import get_logger
from longtrain.tables import say

if TYPE_CHECKING:
    from longtrain.bench.suites import Bench, Context

log = get_logger(__name__)


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names; what was measured before a fault is kept and shown.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench.suites import SUITES, bench_of, brief

    name = str(cfg.suite.name)
    if name not in SUITES and _former(cfg, name):
        return
    bench, context = bench_of(name), context_of(cfg)
    settings = bench.read(plain(cfg.suite), context)
    folder = Path(cfg.run_dir) / "bench"
    rows: list[dict[str, Any]] = []
    try:
        for row in bench.run(settings, context):
            if not rows:  # what was refused leaves the last run's files alone
                provenance.write(folder, plain(cfg))
            rows.append(row)
            _write(folder, name, plain(cfg.suite[bench.group] if bench.group else cfg.suite), rows)
            log.info("suite=%s %s", name, brief(row))
    finally:
        if rows:
            _show(bench, settings, context, folder, name, rows)


def context_of(cfg: DictConfig) -> Context:
    """What suites may know of the configuration beside their own keys."""
    import torch

    from longtrain.bench.suites import Context

    return Context(
        device=torch.device(device_of(cfg)),
        seed=convert(cfg.seed, int, "seed"),
        dtype=str(cfg.target.dtype) if cfg.target else "auto",
        method=plain(cfg.method) if cfg.method else None,
        artifact=str(cfg.artifact) if cfg.artifact else None,
        home=Path(cfg.home),
        sampling=sampling_from(cfg),
        drafting=lambda: drafting_from(cfg),
        load_target=lambda path: load_target_from(cfg, path=path),
    )


def _write(folder: Path, name: str, keys: Any, rows: list[dict[str, Any]]) -> None:
    """Write `NAME.json`: the suite's keys as they were given, the environment and the measurements."""
    content = {"suite": name, "settings": keys, **provenance.gather(), "rows": rows}
    files.write_text(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")


def _show(
    bench: Bench, settings: Any, context: Context, folder: Path, name: str, rows: list[dict[str, Any]]
) -> None:
    """Print the table, and write it and the pictures beside the JSON."""
    text = bench.table(rows, settings, context)
    pictures = bench.pictures(rows) if bench.pictures else {}
    files.write_files(folder, {f"{name}.md": f"{text}\n".encode(), **pictures})
    say(text, f"wrote {', '.join([f'{name}.json', f'{name}.md', *pictures])} in {folder}")


def _former(cfg: DictConfig, name: str) -> bool:
    """Run a suite that has no entry in `bench.suites` yet; whether there is one."""
    import importlib

    if name == "engine":
        _engine(cfg)
    elif name in ("kernels", "linears", "quantise", "quantspec"):
        importlib.import_module(f"longtrain.jobs.bench_{name}").run(cfg)
    elif name == "quantspec_quality":
        importlib.import_module("longtrain.jobs.bench_quality").run(cfg)
    else:
        return False
    return True


def _engine(cfg: DictConfig) -> None:
    from rich.console import Console

    from longtrain.bench import engine, report
    from longtrain.jobs import bench_engine

    rows = bench_engine.engine_rows(cfg)
    folder = Path(cfg.run_dir) / "bench"
    path = report.write(folder, "engine", settings=plain(cfg.suite), rows=rows)
    provenance.write(folder, plain(cfg))
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, engine.COLUMNS), markup=False)
    if cycles := [one for row in rows for one in row.get("steps", [])]:
        console.print(report.table(cycles, engine.STEP_COLUMNS), markup=False)
    console.print(f"wrote {path}", markup=False)
