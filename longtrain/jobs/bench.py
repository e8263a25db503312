"""`longtrain bench`: measure speed or memory on this machine, write JSON, show a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console

from longtrain import provenance
from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.contexts import documents_from_files, parse_tokens
from longtrain.jobs import device_of, load_target_from, plain, sampling_from, shape_from

if TYPE_CHECKING:
    from longtrain.target.model import Target

SUITES = ("engine", "draft_memory")


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench import draft_memory, engine, report

    name = str(cfg.suite.name)
    if name not in SUITES:
        raise ConfigError(f"bench has no suite '{name}'; known: {', '.join(SUITES)}")
    rows = _engine(cfg) if name == "engine" else _draft_memory(cfg)
    folder = Path(cfg.run_dir) / "bench"
    path = report.write(folder, name, settings=plain(cfg.suite), rows=rows)
    provenance.write(folder, plain(cfg))
    columns = engine.COLUMNS if name == "engine" else draft_memory.COLUMNS
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, columns), markup=False)
    console.print(f"wrote {path}", markup=False)


def _engine(cfg: DictConfig) -> list[dict[str, Any]]:
    """Plain against speculative decoding on the held-out text that ships with the package."""
    from longtrain.artifact import Artifact
    from longtrain.bench import engine

    artifact = Artifact.load(cfg.artifact, home=cfg.home) if cfg.artifact else None
    target = load_target_from(cfg, path=artifact.target.name if artifact else None)
    settings = engine.Settings(
        max_new_tokens=int(cfg.suite.max_new_tokens),
        sampling=sampling_from(cfg),
        shape=shape_from(cfg),
        warmup=int(cfg.suite.warmup),
        repeats=int(cfg.suite.repeats),
    )
    rows: list[dict[str, Any]] = []
    for length in map(parse_tokens, cfg.suite.lengths):
        for batch in cfg.suite.batches:
            parts = artifact.attach(target, verify=not rows) if artifact else None
            rows.append(engine.measure(target, parts, _prompts(target, length, batch), settings))
    return rows


def _prompts(target: Target, length: int, batch: int) -> list[list[int]]:
    """Stretches of held-out text, evenly spread.

    Raises:
        DataError: the target has no tokenizer, or there is too little text for this length.
    """
    if target.tokenizer is None:
        raise DataError(f"target {target.info.name} has no tokenizer; bench suite=engine needs real text")
    documents = documents_from_files(asset_dir("bundled") / "text" / "heldout", target.tokenizer)
    ids = [int(token) for document in documents for token in document.ids_T]
    if len(ids) < length:
        raise DataError(f"held-out text has {len(ids)} tokens; lengths={length} asks for more")
    step = (len(ids) - length) // max(1, batch - 1) if batch > 1 else 0
    return [ids[i * step : i * step + length] for i in range(batch)]


def _draft_memory(cfg: DictConfig) -> list[dict[str, Any]]:
    """A LongSpec training step on a random target."""
    from longtrain.bench import draft_memory

    device, suite = device_of(cfg), cfg.suite
    cuda = device.startswith("cuda")
    method = plain(cfg.method) if cfg.method else {}
    method.pop("name", None)
    settings = draft_memory.Settings(
        shape=("llama31_8b" if cuda else "llama_micro") if suite.shape == "auto" else suite.shape,
        dtype=("bfloat16" if cuda else "float32") if suite.dtype == "auto" else suite.dtype,
        device=device,
        lengths=tuple(sorted(map(parse_tokens, suite.lengths))),
        method={**method, "chunk_tokens": int(suite.chunk_tokens)},
        warmup=int(suite.warmup),
        repeats=int(suite.repeats),
        seed=int(cfg.seed),
    )
    return draft_memory.measure(settings)
