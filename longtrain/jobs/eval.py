"""`longtrain eval`: a suite through the harness, acceptance or eviction, or a comparison of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from longtrain import provenance
from longtrain.errors import ConfigError, LongtrainError
from longtrain.evaluation import report
from longtrain.jobs import convert, eval_eviction, eval_harness, load_target_from, sampling_from, shape_from
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.roles import TreeShape
    from longtrain.evaluation.acceptance import Protocol, Variant
    from longtrain.evaluation.contexts import Document
    from longtrain.target.model import Target

log = get_logger(__name__)

OTHERS = ("acceptance", "eviction")
"""Suites with a job of their own; all others run through the harness."""


def run(cfg: DictConfig) -> None:
    """Run the suite `cfg.suite.name`, or compare the finished runs that `cfg.compare` names.

    Raises:
        ConfigError: no such suite, or a setting of it is wrong.
        LongtrainError: speculative output is not that of plain decoding (results are written all the same).
    """
    from longtrain.evaluation.suites import SUITES

    if cfg.compare is not None:
        from longtrain.jobs import eval_compare

        eval_compare.run(cfg)
        return
    name = str(cfg.suite.name)
    if name in SUITES:
        eval_harness.run(cfg)
    elif name == "eviction":
        eval_eviction.run(cfg)
    elif name == "acceptance":
        _acceptance(cfg)
    else:
        known = ", ".join(sorted({*OTHERS, *SUITES}))
        raise ConfigError(f"eval has no suite '{name}'; known: {known}")


def _acceptance(cfg: DictConfig) -> None:
    from longtrain.evaluation.acceptance import run_acceptance
    from longtrain.evaluation.scores import scores
    from longtrain.evaluation.speed import measure_speed

    suite = cfg.suite
    artifacts = _artifacts(cfg)
    target = load_target_from(cfg, path=next(iter(artifacts.values())).target.name)
    variants = _variants(cfg, target, artifacts)
    protocol, dropped = _protocol(cfg, target)
    with _Bar() as bar:
        runs = run_acceptance(target, variants, protocol, advance=bar.advance)
        found = scores(
            variants, protocol, runs=runs, dropped=dropped, seed=int(cfg.seed), resamples=int(suite.bootstrap)
        )
        found["target"] = target.info.name
        found["attention_mass"] = _attention_mass(target, artifacts, protocol) if suite.attention_mass else []
        timings: dict[str, Any] = {}
        if suite.speed_prompts:
            batch, prompts = int(suite.speed_batch), int(suite.speed_prompts)
            timings["device"] = str(target.device)
            timings["speed"] = measure_speed(
                target, variants, protocol, batch=batch, prompts=prompts, advance=bar.advance
            )
    table = report.acceptance_table(found, timings)
    files = {
        "scores.json": report.as_json(found),
        "timings.json": report.as_json(timings),
        "table.md": table.encode(),
        "acceptance.png": report.acceptance_picture(found),
    }
    folder = _write(cfg, files, artifacts={name: str(one.folder) for name, one in artifacts.items()})
    _show(found, timings, folder / "table.md")
    _check_exactness(found)


def _artifacts(cfg: DictConfig) -> dict[str, Artifact]:
    """The artifacts by the name they get in the table."""
    from longtrain.artifact import Artifact

    asked = cfg.artifact if isinstance(cfg.artifact, ListConfig | list) else [cfg.artifact]
    asked = [str(where) for where in asked if where]
    if not asked:
        raise ConfigError("eval needs an artifact; pass artifact=NAME, or artifact=[A,B] to compare several")
    short = [Path(where).name for where in asked]
    names = short if len(set(short)) == len(short) else asked
    return {name: Artifact.load(where, home=cfg.home) for name, where in zip(names, asked, strict=True)}


def _variants(cfg: DictConfig, target: Target, artifacts: dict[str, Artifact]) -> list[Variant]:
    from longtrain.evaluation.acceptance import Variant

    shapes = _shapes(cfg)
    variants = []
    for name, artifact in artifacts.items():
        parts = artifact.attach(target)
        if parts.draft is None:
            raise ConfigError(f"artifact {name} ({artifact.method}) brings no draft; acceptance needs one")
        for shape in shapes:
            label = f"{name} {_shape_name(shape)}" if len(artifacts) > 1 else _shape_name(shape)
            label = label if len(shapes) > 1 else name
            variants.append(Variant(label, parts, shape))
    return variants


def _shapes(cfg: DictConfig) -> list[TreeShape]:
    asked = convert(_plain(cfg.suite.shapes) or [_plain(cfg.decode.shape)], list[Any], "suite.shapes")
    for widths in asked:
        good = isinstance(widths, list) and widths and all(isinstance(w, int) and w > 0 for w in widths)
        if not good:
            raise ConfigError(f"shape {widths} drafts nothing; allowed: widths, e.g. [1,1,1,1] or [4,8,8]")
    return [shape_from(cfg, widths) for widths in asked]


def _shape_name(shape: TreeShape) -> str:
    if set(shape.widths) == {1}:
        return f"chain {shape.depth}"
    return f"tree {'-'.join(str(width) for width in shape.widths)}"


def _protocol(cfg: DictConfig, target: Target) -> tuple[Protocol, dict[str, int]]:
    from longtrain.evaluation.acceptance import Protocol
    from longtrain.evaluation.contexts import choose_points, prefix_of

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
    from longtrain.evaluation.contexts import parse_tokens

    lengths = sorted({parse_tokens(length) for length in _plain(cfg.suite.lengths) or []})
    if not lengths:
        raise ConfigError("lengths=[] measures nothing; pass e.g. lengths=[1k,2k]")
    return tuple(lengths)


def _held_out(cfg: DictConfig, target: Target) -> list[Document]:
    """Documents no draft was trained on, as `suite.text` names them."""
    from longtrain.assets import asset_dir
    from longtrain.data.prepare import tokenizer_hash
    from longtrain.data.prepared import Prepared, read_manifest
    from longtrain.evaluation.contexts import documents_from_files, documents_from_prepared

    if target.tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer, so no text can be given to it")
    where, kinds = cfg.suite.text, _plain(cfg.suite.kinds) or []
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


def _check_exactness(found: dict[str, Any]) -> None:
    for variant in found["variants"]:
        for cell in variant["lengths"]:
            exact = cell["exactness"]
            if exact and exact["violations"]:
                message = (
                    f"output of {variant['name']} at {cell['length']} tokens differs from plain decoding in "
                    f"{exact['different']} of {exact['compared']} prompts, {exact['violations']} beyond "
                    f"rounding (first: {exact['first'][0]})"
                )
                if exact["strict"]:
                    raise LongtrainError(f"{message}; the draft's runtime or the engine is wrong")
                log.warning(message)


def _write(cfg: DictConfig, files: dict[str, bytes], **facts: Any) -> Path:
    folder = Path(cfg.run_dir) / "eval"
    report.write_files(folder, files)
    provenance.write(folder, _plain(cfg), **facts)
    return folder


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


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


class _Bar:
    """A progress line: what is running, and prompts done."""

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        count = TextColumn("{task.completed:.0f} prompts")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), count)
        self.progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self.progress.start()
        self.tasks: dict[str, Any] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, what: str, done: int) -> None:
        """Count prompts."""
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=None)
        self.progress.advance(self.tasks[what], done)
