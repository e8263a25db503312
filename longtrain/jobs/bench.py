"""`longtrain bench`: measure speed or memory on this machine, write JSON and pictures, show a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from longtrain import files, provenance
from longtrain.assets import asset_dir
from longtrain.jobs.setup import convert, device_of, drafting_from, load_target_from, plain, sampling_from
from longtrain.log import get_logger
from longtrain.settings import AUTO, Counts
from longtrain.tables import say

if TYPE_CHECKING:
    from longtrain.bench.suites import Bench, Context
    from longtrain.targets.model import Target

log = get_logger(__name__)


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names; what was measured before a fault is kept and shown.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench.suites import bench_of, brief
    from longtrain.jobs import bench_quality

    name = str(cfg.suite.name)
    if name == "quantspec_quality":
        bench_quality.run(cfg)
        return
    if cfg.suite.get("eval") is not None and cfg.suite.shape is None:
        _hand_over(cfg)
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


def _hand_over(cfg: DictConfig) -> None:
    """Let `longtrain eval` measure what needs a real target and text, with the keys under `suite.eval`.

    Keys of the same name in `suite` go before them, unless they are `auto` or null.
    """
    import torch
    from omegaconf import OmegaConf

    from longtrain.bench.cycles import limit_memory
    from longtrain.jobs import eval as eval_job

    conf, given = asset_dir("conf"), plain(cfg.suite)
    keys = given["eval"]
    keys |= {key: given[key] for key in keys if key != "name" and given.get(key, AUTO) not in (AUTO, None)}
    if given["drafted"] != AUTO:
        keys["shapes"] = [[1] * count for count in convert(given["drafted"], Counts, "suite.drafted")]
    limit_memory(given["memory_gib"], torch.device(device_of(cfg)))
    suite = OmegaConf.load(conf / "suite" / "common.yaml").suite
    suite = OmegaConf.merge(suite, OmegaConf.load(conf / "suite" / f"{keys['name']}.yaml").suite)
    own = plain(OmegaConf.load(conf / "eval.yaml"))
    del own["defaults"]
    with open_dict(cfg):
        step = OmegaConf.merge(own, cfg, {"job": "eval"})
    assert isinstance(step, DictConfig)
    step.suite = OmegaConf.merge(suite, keys)
    eval_job.run(step)


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
        held_out=_held_out,
    )


def _held_out(target: Target) -> list[int]:
    """The tokens of the held-out text that ships here, all documents in a row."""
    from longtrain.evaluation.corpora import documents_from_files

    folder = asset_dir("bundled") / "text" / "heldout"
    documents = documents_from_files(folder, target.require_tokenizer())
    return [int(token) for document in documents for token in document.ids_T]


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
