"""`longtrain bench`: measure speed or memory on this machine, write JSON and pictures, print a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import files, provenance
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.jobs.setup import load_target
from longtrain.log import get_logger
from longtrain.progress import follow
from longtrain.tables import print_lines

if TYPE_CHECKING:
    from longtrain.bench.suites import Bench, Context, HeldOutWanted
    from longtrain.config import RunConfig, TargetConfig
    from longtrain.targets.model import Target

log = get_logger(__name__)


def run(cfg: RunConfig) -> None:
    """Run the suite named by `suite.name`; measurements made before an error are written and shown.

    Raises:
        ConfigError: there is no such suite, or one of its keys is wrong.
    """
    from longtrain.bench.suites import brief

    name, (bench, context, settings) = cfg.suite.name, _read(cfg)
    folder = cfg.run_dir / "bench"
    rows: list[dict[str, Any]] = []
    try:
        for row in follow(bench.run(settings, context), f"bench {name}", unit="measurements"):
            if not rows:  # a refused run leaves the files of the previous one unchanged
                provenance.write(folder, cfg.values)
            rows.append(row)
            _write(folder, name, cfg.suite.values, rows)
            log.info("suite=%s %s", name, brief(row))
    finally:
        if rows:
            _show(bench, settings, context, folder, name, rows)


def check(cfg: RunConfig) -> None:
    """Refuse wrong keys of a suite; measures nothing.

    Raises:
        ConfigError: there is no such suite, or one of its keys is wrong.
    """
    _read(cfg)


def _read(cfg: RunConfig) -> tuple[Bench, Context, Any]:
    """The requested bench suite, its context, and its parsed settings."""
    from longtrain.bench.suites import bench_of

    bench, context = bench_of(cfg.suite.name), context_of(cfg)
    return bench, context, bench.read(cfg.suite.values, context)


def context_of(cfg: RunConfig) -> Context:
    """The parts of the configuration that bench suites may read in addition to their own keys."""
    import torch

    from longtrain.bench.suites import Context

    budget = cfg.evict.budget_tokens
    return Context(
        device=torch.device(cfg.target.device_here()),
        seed=cfg.seed,
        dtype=cfg.target.dtype,
        method=cfg.method.values if cfg.method else None,
        artifact=_one_artifact(cfg.artifacts),
        reading=cfg.select if budget is None else {"budget_tokens": budget, **cfg.select},
        home=cfg.home,
        sampling=cfg.sampling,
        target_shape=partial(_target_shape, cfg.target),
        drafting=cfg.decode.drafting,
        lookup=cfg.decode.lookup or "off",
        load_target=lambda path: load_target(cfg.target, seed=cfg.seed, path=path),
        held_out=_held_out,
    )


def _one_artifact(names: Sequence[str]) -> str | None:
    """The artifact to measure, or None if none is named."""
    if len(names) > 1:
        raise ConfigError(f"artifact=[{','.join(names)}]; bench measures one of them at a time")
    return names[0] if names else None


def _target_shape(asked: TargetConfig) -> str | dict[str, Any] | None:
    """The shape of the target: the name of a published shape, or the keys of its config.json."""
    from longtrain.costs.model import Sizes
    from longtrain.jobs.planning.target_shape import config_file, target_shape
    from longtrain.targets.shapes import SHAPES

    if not (asked.path or asked.shape):
        return None
    size = Sizes.of(target_shape(asked)[0])
    for name, keys in SHAPES.items():
        if Sizes.of_keys(keys) == size:
            return name
    if (file := config_file(str(asked.path or ""))) is not None:
        return dict(read_json(file))
    raise ConfigError(
        f"target.path={asked.path} is not on this machine, and the suite builds a random model of its "
        f"config.json; pass a folder, or suite.shape= with one of: {', '.join(SHAPES)}"
    )


def _held_out(target: Target, wanted: HeldOutWanted | None) -> list[int]:
    """Token ids of a stretch of held-out text, or of all bundled held-out text if `wanted` is None."""
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
    """Write `NAME.json`: the suite's keys as typed, the environment and the measurements."""
    content = {"suite": name, "settings": keys, **provenance.gather(), "rows": rows}
    files.write_text(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")


def _show(
    bench: Bench, settings: Any, context: Context, folder: Path, name: str, rows: list[dict[str, Any]]
) -> None:
    """Print the table, and write the table and pictures beside the JSON."""
    text = bench.table(rows, settings, context)
    pictures = bench.pictures(rows) if bench.pictures else {}
    files.write_files(folder, {f"{name}.md": f"{text}\n".encode(), **pictures})
    print_lines(text, f"wrote {', '.join([f'{name}.json', f'{name}.md', *pictures])} in {folder}")
