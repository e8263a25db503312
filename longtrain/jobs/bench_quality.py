"""`longtrain bench suite=quantspec_quality`: what to measure, from the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console

from longtrain import files, methods, provenance
from longtrain.assets import asset_dir
from longtrain.bench import quantspec_quality, report
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.evaluation import quantised, row_invariance, same_text
from longtrain.evaluation.contexts import Point, choose_points, documents_from_files, prefix_of
from longtrain.evaluation.exactness import enforce
from longtrain.jobs.setup import convert, load_target_from, plain, typed
from longtrain.kernels.hierarchical.layout import BLOCK, Split
from longtrain.log import get_logger
from longtrain.methods import policies
from longtrain.settings import parse_tokens

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]
SECTIONS = ("perplexity", "axes", "rows", "texts")
LEAST = {
    "windows": 1,
    "scored_tokens": 1,
    "batch": 1,
    "prompts": 1,
    "text_batch": 1,
    "max_new_tokens": 2,
    "bootstrap": 1,
}
_STEP_TOKENS = 24
"""Tokens that are read row by row and in steps."""


@dataclass(frozen=True)
class Settings:
    """`suite` in the types that measuring takes.

    Args:
        sections: of `SECTIONS`.
        lengths: of contexts, ascending.
        counts: the keys of `LEAST`.
        splits: see `kernels.hierarchical.layout.Split`.
        bits: of `8` and `4`.
        shapes: chains.
        row_counts: rows of a step.
    """

    sections: tuple[str, ...]
    lengths: tuple[int, ...]
    counts: dict[str, int]
    splits: tuple[Split, ...]
    bits: tuple[int, ...]
    shapes: tuple[TreeShape, ...]
    row_counts: tuple[int, ...]


def run(cfg: DictConfig) -> None:
    """Measure, write `quantspec_quality.json` (again whenever there is a new row), tables and a picture.

    Raises:
        ConfigError: a key of the suite is wrong, or the target has no tokenizer.
        DataError: there is too little text.
        LongtrainError: a text parts from plain decoding as no rounding explains.
    """
    from longtrain.artifact import Artifact

    asked = settings_of(cfg)
    artifact = Artifact.load(cfg.artifact, home=cfg.home) if cfg.artifact else None
    target = load_target_from(cfg, path=artifact.target.name if artifact else None)
    longest = asked.lengths[-1] + max(asked.counts[key] for key in ("scored_tokens", "max_new_tokens"))
    if longest > target.info.max_positions:
        raise ConfigError(
            f"contexts of {asked.lengths[-1]} tokens and what follows them exceed the context of "
            f"{target.info.max_positions} of target {target.info.name}; pass shorter lengths="
        )
    folder = Path(cfg.run_dir) / "bench"
    provenance.write(folder, plain(cfg))
    rows: list[Json] = []
    try:
        for row in _rows(cfg, asked, target, artifact):
            rows.append(row)
            log.info("%s", " ".join(f"{key}={value}" for key, value in row.items() if key != "windows"))
            path = report.write(folder, "quantspec_quality", settings=plain(cfg.suite), rows=rows)
    finally:  # what was measured before a fault is shown too
        console = Console(soft_wrap=True, highlight=False)
        text = quantspec_quality.markdown(rows)
        files.write_text(folder / "quantspec_quality.md", text)
        console.print(text, markup=False)
        if (png := quantspec_quality.picture(rows)) is not None:
            (folder / "quantspec_quality.png").write_bytes(png)
    console.print(f"wrote {path}, a table and a picture beside it", markup=False)
    enforce(
        (f"{row['system']} of shape {row['shape']}", row["exactness"])
        for row in rows
        if row["section"] == "texts"
    )


def settings_of(cfg: DictConfig) -> Settings:
    """`suite`, checked.

    Raises:
        ConfigError: a value of another type, or one that is not allowed.
    """
    suite = plain(cfg.suite)
    counts = {key: convert(suite[key], int, f"suite.{key}") for key in LEAST}
    for key, least in LEAST.items():
        if counts[key] < least:
            raise ConfigError(f"suite.{key}={counts[key]}; allowed: {least} or more")
    sections = convert(suite["sections"], list[str], "suite.sections")
    splits = convert(suite["splits"], list[str], "suite.splits")
    bits = convert(suite["bits"], list[int], "suite.bits")
    for key, values, allowed in (
        ("sections", sections, SECTIONS),
        ("splits", splits, tuple(split.value for split in Split)),
        ("bits", bits, (8, 4)),
    ):
        wrong = [value for value in values if value not in allowed]
        if wrong or not values:
            raise ConfigError(f"suite.{key}={values}; allowed: one or more of {', '.join(map(str, allowed))}")
    drafted = convert(suite["drafted"], list[int], "suite.drafted")
    row_counts = convert(suite["row_counts"], list[int], "suite.row_counts")
    for key, values in (("drafted", drafted), ("row_counts", row_counts)):
        if not values or not all(1 <= value <= _STEP_TOKENS for value in values):
            raise ConfigError(f"suite.{key}={values}; allowed: numbers from 1 to {_STEP_TOKENS}")
    lengths = sorted({parse_tokens(length) for length in suite["lengths"]})
    if not lengths or lengths[0] < 2:
        raise ConfigError(f"lengths={suite['lengths']}; allowed: contexts of 2 tokens or more, e.g. [1k,4k]")
    return Settings(
        sections=tuple(section for section in SECTIONS if section in sections),
        lengths=tuple(lengths),
        counts=counts,
        splits=tuple(map(Split, splits)),
        bits=tuple(bits),
        shapes=tuple(TreeShape((1,) * count) for count in drafted),
        row_counts=tuple(row_counts),
    )


def _rows(cfg: DictConfig, asked: Settings, target: Target, artifact: Artifact | None) -> Iterator[Json]:
    """Every row of the report, as it is measured."""
    counts, prefix = asked.counts, tuple(prefix_of(target.tokenizer))
    points = _points(cfg, asked, target)
    for section in asked.sections:
        if section in ("perplexity", "axes"):
            readings = (
                quantised.decoding_caches(asked.splits, asked.bits)
                if section == "perplexity"
                else quantised.axis_choices(asked.splits[0], asked.bits)
            )
            for length in asked.lengths:
                windows = [_window(point, length, prefix, counts["scored_tokens"]) for point in points]
                found = quantised.score(target, readings, windows, batch=counts["batch"])
                how = {"seed": convert(cfg.seed, int, "seed"), "resamples": counts["bootstrap"]}
                for row in quantised.figures(found, **how):
                    yield {"section": section, "context_tokens": length, **row}
            continue
        systems = _systems(cfg, asked, target, artifact)
        if section == "rows":
            yield from _steps(asked, target, systems[0], points[0], prefix)
            continue
        for parts in systems:
            for length in asked.lengths:
                prompts = [point.prompt(length, prefix) for point in points[: counts["prompts"]]]
                found_rows = same_text.measure(
                    target,
                    parts,
                    prompts,
                    asked.shapes,
                    max_new_tokens=counts["max_new_tokens"],
                    batch=counts["text_batch"],
                )
                for row in found_rows:
                    yield {"section": section, **row}


def _steps(
    asked: Settings, target: Target, parts: Parts, point: Point, prefix: tuple[int, ...]
) -> Iterator[Json]:
    """Steps of several rows on the quantised cache and on the plain one."""
    length = max(asked.lengths[0] // BLOCK, 1) * BLOCK + 1  # then no block is quantised for a while
    length = min(length, point.end)
    prompt, text = point.prompt(length, prefix), point.document.ids_T[point.end :][:_STEP_TOKENS].tolist()
    for cache, one in (("quantised", replace(parts, draft=None)), ("plain", Parts())):
        for row in row_invariance.measure(target, one, prompt, text, counts=asked.row_counts):
            yield {"section": "rows", "cache": cache, "context_tokens": length, **row}


def _systems(cfg: DictConfig, asked: Settings, target: Target, artifact: Artifact | None) -> list[Parts]:
    """QuantSpec with each split, and the artifact's draft on QuantSpec's cache and over an evicted one.

    Raises:
        ConfigError: another method than QuantSpec, or an artifact that brings no draft.
    """
    spec = methods.get("quantspec")
    values = plain(cfg.method) if cfg.method else {"name": spec.name}
    if values.pop("name") != spec.name:
        raise ConfigError(
            f"method={cfg.method.name} for suite=quantspec_quality; allowed: quantspec, or none; pass a "
            "draft as artifact=NAME"
        )
    config: Any = replace(typed(spec.config, values, "method"), draft=True)
    assert spec.attach is not None
    found = []
    for split in asked.splits:
        own = replace(config, split=split.value)
        parts = spec.attach(spec.build(own, target.info), target, own, {})
        found.append(replace(parts, name=f"{spec.name} {split.value}"))
    if artifact is None:
        return found
    drafting = artifact.attach(target)
    if drafting.draft is None:
        raise ConfigError(f"artifact={cfg.artifact} brings no draft; pass one that drafts, or none")
    suite = plain(cfg.suite)
    budget = convert(suite["budget"], float, "suite.budget")
    held = Budget(ratio=budget) if budget < 1 else Budget(tokens=int(budget))
    evictor = policies.make(convert(suite["policy"], str, "suite.policy"), held, {})
    name = drafting.name
    return [
        *found,
        replace(drafting.merge(Parts(cache=found[0].cache)), name=f"{name}, quantised cache"),
        replace(drafting.merge(Parts(evictor=evictor)), name=f"{name}, {evictor.name} at {suite['budget']}"),
    ]


def _points(cfg: DictConfig, asked: Settings, target: Target) -> list[Point]:
    """End points of contexts in held-out text.

    Raises:
        ConfigError: the target has no tokenizer.
        DataError: there is too little text.
    """
    if target.tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer, so no text can be given to it")
    path = Path(cfg.suite.text).expanduser() if cfg.suite.text else asset_dir("bundled") / "text" / "heldout"
    kinds = convert(plain(cfg.suite)["kinds"], list[str], "suite.kinds")
    chosen = choose_points(
        documents_from_files(path, target.tokenizer, kinds=kinds),
        longest=max(asked.lengths[-1], BLOCK + 1),
        count=asked.counts["windows"],
        margin=max(asked.counts["scored_tokens"], _STEP_TOKENS),
        seed=convert(cfg.seed, int, "seed"),
    )
    for reason, count in chosen.dropped.items():
        log.warning("%d %s", count, reason)
    return chosen.points


def _window(point: Point, length: int, prefix: tuple[int, ...], scored: int) -> quantised.Window:
    """A context and the tokens after it."""
    return point.prompt(length, prefix), point.document.ids_T[point.end : point.end + scored].tolist()
