"""`longtrain bench`: measure speed or memory on this machine, write JSON and pictures, show a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import files, provenance
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.jobs.setup import convert, device_of, drafting_from, load_target_from, plain, sampling_from
from longtrain.log import get_logger
from longtrain.progress import follow
from longtrain.tables import say

if TYPE_CHECKING:
    from longtrain.bench.suites import Bench, Context, HeldOutWanted
    from longtrain.targets.model import Target

log = get_logger(__name__)


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names; what was measured before an error is kept and shown.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench.suites import brief

    name, (bench, context, settings) = str(cfg.suite.name), _read(cfg)
    folder = Path(cfg.run_dir) / "bench"
    rows: list[dict[str, Any]] = []
    try:
        for row in follow(bench.run(settings, context), f"bench {name}", unit="measurements"):
            if not rows:  # a run that is refused leaves the files of the last one alone
                provenance.write(folder, plain(cfg))
            rows.append(row)
            _write(folder, name, plain(cfg.suite), rows)
            log.info("suite=%s %s", name, brief(row))
    finally:
        if rows:
            _show(bench, settings, context, folder, name, rows)


def check(cfg: DictConfig) -> None:
    """Refuse wrong keys of a suite; measures nothing.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    _read(cfg)


def _read(cfg: DictConfig) -> tuple[Bench, Context, Any]:
    """A suite of bench, what it may know, and its settings."""
    from longtrain.bench.suites import bench_of

    bench, context = bench_of(str(cfg.suite.name)), context_of(cfg)
    return bench, context, bench.read(plain(cfg.suite), context)


def context_of(cfg: DictConfig) -> Context:
    """What suites may know of the configuration beside their own keys."""
    import torch

    from longtrain.bench.suites import Context

    reading = {"budget_tokens": cfg.evict.get("budget_tokens"), **plain(cfg.select)}
    return Context(
        device=torch.device(device_of(cfg)),
        seed=convert(cfg.seed, int, "seed"),
        dtype=str(cfg.target.dtype) if cfg.target else "auto",
        method=plain(cfg.method) if cfg.method else None,
        artifact=str(cfg.artifact) if cfg.artifact else None,
        reading={key: value for key, value in reading.items() if value is not None},
        home=Path(cfg.home),
        sampling=sampling_from(cfg),
        target_shape=lambda: _target_shape(cfg),
        drafting=lambda: drafting_from(cfg),
        load_target=lambda path: load_target_from(cfg, path=path),
        held_out=_held_out,
    )


def _target_shape(cfg: DictConfig) -> str | dict[str, Any] | None:
    """The shape of the target that is named: that of a published one, else the keys of its config.json.

    Raises:
        ConfigError: neither is at hand.
    """
    from longtrain.costs.model import Sizes
    from longtrain.jobs.outline import config_file, target_shape
    from longtrain.targets.shapes import SHAPES

    if not (cfg.target and (cfg.target.path or cfg.target.shape)):
        return None
    size = Sizes.of(target_shape(cfg)[0])
    for name, keys in SHAPES.items():
        if Sizes.of_keys(keys) == size:
            return name
    if (file := config_file(str(cfg.target.path or ""))) is not None:
        return dict(read_json(file))
    raise ConfigError(
        f"target.path={cfg.target.path} is not on this machine, and the suite builds a random model of its "
        f"config.json; pass a folder, or suite.shape= with one of: {', '.join(SHAPES)}"
    )


def _held_out(target: Target, wanted: HeldOutWanted | None) -> list[int]:
    """The tokens of a stretch of held-out text; for None those of all that ships here, in a row."""
    from longtrain.evaluation.corpora import prefix_of
    from longtrain.evaluation.suites.continuation import choose_points, held_out

    if wanted is None:
        return [int(token) for document in held_out(target, "bundled", ()) for token in document.ids_T]
    documents = held_out(target, wanted.text or "bundled", wanted.kinds)
    chosen = choose_points(documents, longest=wanted.length, count=1, margin=wanted.after, seed=wanted.seed)
    (point,) = chosen.points
    after = point.document.ids_T[point.end :][: wanted.after].tolist()
    return [*point.prompt(wanted.length, prefix_of(target.tokenizer)), *after]


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
