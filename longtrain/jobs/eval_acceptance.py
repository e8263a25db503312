"""`longtrain eval suite=acceptance`: the harness measures, and the figures by context length are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from longtrain import files as files_
from longtrain import provenance
from longtrain.errors import ConfigError
from longtrain.evaluation import report
from longtrain.evaluation.acceptance import Protocol, Variant, check
from longtrain.evaluation.contexts import Document, choose_points, prefix_of
from longtrain.evaluation.exactness import enforce
from longtrain.evaluation.harness.protocol import json_hash
from longtrain.evaluation.harness.run import ledger_settings, times_of
from longtrain.evaluation.harness.session import Session
from longtrain.evaluation.scores import scores
from longtrain.evaluation.suites.continuation import runs_of, suite_of
from longtrain.evaluation.suites.drafting import told
from longtrain.jobs.setup import convert, load_target_from, plain, sampling_from, shape_from, systems_of
from longtrain.log import get_logger
from longtrain.settings import parse_tokens
from longtrain.systems import Builder

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.roles import TreeShape
    from longtrain.targets.model import Target

log = get_logger(__name__)


@dataclass
class AcceptanceSession(Session):
    """A session with what its figures are made of.

    Args:
        asked: lengths, points and settings.
        dropped: prompts that were asked for and could not be had, by reason.
        artifacts: by the name they get in the table.
    """

    asked: Protocol = field(kw_only=True)
    dropped: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)


def session_of(cfg: DictConfig) -> AcceptanceSession:
    """Target, prompts and drafts as `cfg` names them, checked.

    What is done is kept under the hash of all settings, so that other settings start anew.

    Raises:
        ConfigError: a setting is wrong, or nothing drafts.
        DataError: there is no held-out text, or not enough of it.
    """
    from longtrain.jobs.eval_harness import budgets_of_suite

    entries, artifacts = systems_of(cfg)
    if not entries:
        raise ConfigError(
            "suite=acceptance measures drafts and none is given; pass artifact=NAME, or artifact=[A,B] to "
            "compare several (longtrain eval suite=smoke artifact=checkpoints/mine), or method=quantspec, "
            "which needs no artifact"
        )
    first = next(iter(artifacts.values()), None)
    target = load_target_from(cfg, path=first.target.name if first else None)
    asked, dropped = _protocol(cfg, target)
    notes = [f"{count} {reason}" for reason, count in dropped.items()]
    suite = suite_of(asked, notes)
    builder = Builder(
        target,
        budgets_of_suite(_values(cfg.suite.budgets)),
        _shapes(cfg),
        artifacts.__getitem__,
        greedy=asked.sampling.greedy,
    )
    systems = builder.systems(entries, roles=suite.needs, taker="suite acceptance")
    if not any(one.drafts for one in systems):
        raise ConfigError(
            f"{systems[1].name} brings no draft, and suite=acceptance measures drafts; put a draft beside it "
            "(suite.systems=[{artifact: [DRAFT, EVICTOR]}]), or pass suite=longbench, ruler or needle"
        )
    check(target, [system.name for system in systems], asked)
    session = AcceptanceSession(
        target=target,
        suite=told(suite, systems),
        systems=systems if asked.compare else systems[1:],
        sampling=asked.sampling,
        folder=Path(),
        home=Path(cfg.home),
        batch=asked.batch,
        resamples=int(cfg.suite.bootstrap),
        check=False,
        asked=asked,
        dropped=dropped,
        artifacts=artifacts,
    )
    settings = [ledger_settings(session.protocol, target, system) for system in session.systems]
    session.folder = Path(cfg.run_dir) / "eval" / str(cfg.suite.name) / json_hash(settings)
    return session


def finish(cfg: DictConfig, session: AcceptanceSession) -> None:
    """Write and show the figures of finished work.

    Raises:
        ConfigError: something is not done yet.
        LongtrainError: a draft's texts are not those of plain decoding.
    """
    from longtrain.jobs.eval_harness import exactness_of, reports

    outcome = session.finish()
    variants = [Variant(one.name, one.parts, one.shape) for one in session.systems if one.drafts]
    found = _scores(session, variants)
    found["attention_mass"] = (
        _attention_mass(session.target, session.artifacts, session.asked) if cfg.suite.attention_mass else []
    )
    timings = {**outcome.timings, **_speed(cfg, session, variants)}
    folder = Path(cfg.run_dir) / "eval"
    table = report.acceptance_table(found, timings)
    files = {
        "scores.json": files_.as_json(found),
        "timings.json": files_.as_json(timings),
        "table.md": table.encode(),
        "acceptance.png": report.acceptance_picture(found),
    }
    files_.write_files(folder, files)
    more = {"results.json": files_.as_json(outcome.results), "examples.jsonl": files_.jsonl(outcome.examples)}
    files_.write_files(folder / str(cfg.suite.name), {**more, **reports(cfg, outcome, outcome.timings)})
    places = {name: str(one.folder) for name, one in session.artifacts.items()}
    provenance.write(folder, plain(cfg), artifacts=places)
    _show(found, timings, folder / "table.md")
    enforce(_exactness_of(found))
    enforce(exactness_of(outcome.results))  # drafts over an evictor or another cache


def _scores(session: AcceptanceSession, variants: Sequence[Variant]) -> dict[str, Any]:
    costs = {
        (system.name, row["task"]): row
        for system in session.systems
        for row in times_of(session.ledger(system))
    }
    runs = runs_of(session.target, session.systems, session.records(), session.asked, costs=costs)
    found = scores(
        variants,
        session.asked,
        runs=runs,
        dropped=session.dropped,
        seed=session.sampling.seed,
        resamples=session.resamples,
    )
    return {**found, "target": session.target.info.name}


def _speed(cfg: DictConfig, session: AcceptanceSession, variants: Sequence[Variant]) -> dict[str, Any]:
    from longtrain.evaluation.speed import measure_speed
    from longtrain.progress import Progress

    prompts, batch = int(cfg.suite.speed_prompts), int(cfg.suite.speed_batch)
    if not prompts:
        return {}
    asked = session.asked
    steps = min(prompts, len(asked.points)) * len(asked.lengths) * (1 + len(variants))
    with Progress(steps, 0, "timed prompts") as bar:
        rows = measure_speed(
            session.target, variants, asked, batch=batch, prompts=prompts, advance=bar.advance
        )
    return {"speed": rows}


def _shapes(cfg: DictConfig) -> list[TreeShape]:
    asked = convert(_values(cfg.suite.shapes) or [_values(cfg.decode.shape)], list[Any], "suite.shapes")
    for widths in asked:
        good = isinstance(widths, list) and widths and all(isinstance(w, int) and w > 0 for w in widths)
        if not good:
            raise ConfigError(f"shape {widths} drafts nothing; allowed: widths, e.g. [1,1,1,1] or [4,8,8]")
    return [shape_from(cfg, widths) for widths in asked]


def _protocol(cfg: DictConfig, target: Target) -> tuple[Protocol, dict[str, int]]:
    suite = cfg.suite
    least = {
        "prompts": 1,
        "max_new_tokens": 2,
        "batch": 1,
        "bootstrap": 1,
        "speed_prompts": 0,
        "speed_batch": 1,
    }
    for key, low in least.items():
        if int(suite[key]) < low:
            raise ConfigError(f"suite.{key}={suite[key]}; allowed: {low} or more")
    lengths = _lengths(cfg)
    chosen = choose_points(
        _held_out(cfg, target),
        longest=lengths[-1],
        count=int(suite.prompts),
        margin=int(suite.max_new_tokens),
        seed=int(cfg.seed),
    )
    protocol = Protocol(
        lengths=lengths,
        points=chosen.points,
        prefix=tuple(prefix_of(target.tokenizer)),
        max_new_tokens=int(suite.max_new_tokens),
        batch=int(suite.batch),
        sampling=sampling_from(cfg),
        ignore_eos=bool(suite.ignore_eos),
        compare=bool(suite.baseline),
    )
    return protocol, chosen.dropped


def _lengths(cfg: DictConfig) -> tuple[int, ...]:
    lengths = sorted({parse_tokens(length) for length in _values(cfg.suite.lengths) or []})
    if not lengths:
        raise ConfigError("lengths=[] measures nothing; pass e.g. lengths=[1k,2k]")
    return tuple(lengths)


def _held_out(cfg: DictConfig, target: Target) -> list[Document]:
    """Documents no draft was trained on, as `suite.text` names them."""
    from longtrain.assets import asset_dir
    from longtrain.data.rows.prepare import tokenizer_hash
    from longtrain.data.rows.prepared import Prepared, read_manifest
    from longtrain.evaluation.contexts import documents_from_files, documents_from_prepared

    if target.tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer, so no text can be given to it")
    where, kinds = cfg.suite.text, _values(cfg.suite.kinds) or []
    if where in (None, "data"):
        name = OmegaConf.select(cfg, "data.name")
        folder = Path(cfg.home) / "data" / f"{name}-{tokenizer_hash(target.tokenizer)[:8]}"
        if where == "data" and name is None:
            raise ConfigError("suite.text=data needs data=NAME; allowed: a file or folder, bundled, data")
        manifest = read_manifest(folder) if name is not None else None
        if where == "data" or (manifest is not None and manifest["counts"]["val_documents"]):
            log.info("text=%s (held-out documents)", folder)
            return documents_from_prepared(Prepared.open(folder), kinds=kinds)
    bundled = where in (None, "bundled")
    path = asset_dir("bundled") / "text" / "heldout" if bundled else Path(where)
    log.info("text=%s", path)
    prose = "book" if bundled else "text"  # the excerpt that ships is from novels
    return documents_from_files(path, target.tokenizer, kinds=kinds, prose=prose)


def _attention_mass(
    target: Target, artifacts: dict[str, Artifact], protocol: Protocol
) -> list[dict[str, Any]]:
    """For the first artifact that has a window."""
    from dataclasses import asdict

    from longtrain.evaluation.attention_mass import attention_mass

    for artifact in artifacts.values():
        if "window" in artifact.config:
            layer, window = artifact.config.get("kv_source_layer", -1), artifact.config["window"]
            found = {
                length: attention_mass(target, protocol.prompts(length), layer=int(layer), window=int(window))
                for length in protocol.lengths
            }
            return [{"length": length, **asdict(mass)} for length, mass in found.items()]
    raise ConfigError("suite.attention_mass=true needs a draft with a window; none of the artifacts has one")


def _values(node: Any) -> Any:
    """A part of the configuration as plain values, whatever was typed there."""
    return plain(node) if OmegaConf.is_config(node) else node


def _exactness_of(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for variant in found["variants"]:
        for cell in variant["lengths"]:
            yield f"{variant['name']} at {cell['length']} tokens", cell["exactness"]


def _show(found: dict[str, Any], timings: dict[str, Any], table: Path) -> None:
    """The main figures on the terminal; the table on disk has the rest."""
    from rich.console import Console
    from rich.table import Table

    speed = {row["length"]: row["figures"] for row in timings.get("speed", [])}
    shown = Table(box=None, header_style="bold")
    for column in ("draft", "context", "τ", "accepted", "repeated", "output", "tokens/s"):
        shown.add_column(column, no_wrap=column != "output")
    for variant in found["variants"]:
        for cell in variant["lengths"]:
            row = report.summary(variant, cell, speed.get(cell["length"]))
            shown.add_row(*row)
    console = Console(highlight=False)
    console.print(shown)
    console.print(f"all figures: {table}", soft_wrap=True)
