"""Write the trained module of a run as an artifact, read it back, compare, and upload it if asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import methods, provenance
from longtrain.assets import artifact_kind
from longtrain.data.rows.prepared import read_manifest
from longtrain.errors import ArtifactError, ConfigError, first_line
from longtrain.files import CHECKSUM, read_json, read_sealed
from longtrain.jobs.exporting import formats, push
from longtrain.jobs.exporting.comparison import compare
from longtrain.jobs.setup import load_target_from, load_tensors
from longtrain.log import get_logger
from longtrain.settings import convert, from_file
from longtrain.targets.at_hand import licence_of

if TYPE_CHECKING:
    from torch import nn

    from longtrain.artifact import Artifact
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.model import Target
    from longtrain.training.checkpoint import Saved

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class _Named:
    """What is read of the method of a run."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Placed:
    """What is read of the target of a run."""

    path: str | None


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What is read of the configuration of a run; it holds more."""

    method: _Named
    target: _Placed | None = None


def run(cfg: DictConfig) -> None:
    """Export the last checkpoint of the run `cfg.name`, or write `cfg.artifact` in a `format`.

    Where several methods were trained together, each is an artifact in a folder of its name.

    Raises:
        ConfigError: nothing was trained under this name, or with another method, or the format is unknown or
            cannot say what the module does.
        ArtifactError: the checkpoint is damaged, of another module, other settings or another target, or the
            disk is full; or what was written is marked as unverified, since a comparison failed.
    """
    from longtrain.training import checkpoint

    if cfg.verify is not None:
        formats.verify(cfg)
        return
    form = formats.asked(cfg)
    if form is not None and (named := formats.source(cfg)) is not None:
        formats.write(cfg, form, named)
        return
    if cfg.push:
        push.check(cfg)
        if (named := formats.source(cfg)) is not None:
            push.again(cfg, named)
            return
    trained = Path(cfg.run_dir) / "train"
    path = checkpoint.find(trained / "checkpoints", "auto")
    if path is None:
        where = trained / "checkpoints"
        raise ConfigError(f"nothing was trained under name={cfg.name}: no checkpoint in {where}; train first")
    saved = checkpoint.read(path)
    unfinished = _unfinished(cfg, saved, trained)
    settings = _settings(trained, cfg)
    spec = methods.get(str(settings["method"]["name"]))
    config = _config(spec, settings["method"])
    facts = _facts(trained, settings, home=Path(cfg.home), step=saved.step, trust=bool(cfg.unverified))
    facts["license"] = push.licence(cfg)
    if unfinished:
        facts["unfinished"] = unfinished
    tensors = checkpoint.trained_tensors(path)
    folder = Path(cfg.home) / "checkpoints" / str(cfg.name)
    if spec.export is not None:
        if form is not None:
            raise ConfigError(f"format={form}: method {spec.name} makes no artifact; leave format out")
        _same_settings(saved, settings["method"], trained)
        module = spec.build(config, None)
        load_tensors(module, tensors, str(path), "pass the settings of the run")
        push.target(cfg, spec, config, module, folder=folder, facts=facts)
        return
    _same_settings(saved, settings["method"], trained)
    single = spec.members is None
    for place in [folder] if spec.members is None else [folder / name for name in spec.members(config)]:
        artifact_kind(place).refuse_other(place)
    if form is not None and single:
        formats.check(spec.name, form, config, None)
    target = load_target_from(cfg, path=(settings.get("target") or {}).get("path"), fuse=False)
    _same_target(saved, target)
    if form is not None and single:
        formats.check(spec.name, form, config, target.info)
    module = spec.build(config, target.info)
    load_tensors(module, tensors, str(path), "pass the settings of the run")
    module = module.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    facts["target_license"] = licence_of(str(target.info.name))
    if spec.members is None:
        artifact = _write(cfg, spec, config, module, target=target, folder=folder, facts=facts)
        _refuse_unverified(cfg, [artifact])
        if form is not None:
            formats.write(cfg, form, str(folder), target=target)
        elif cfg.push:
            push.push(cfg, artifact, str(cfg.push))
        return
    members = spec.members(config)
    if form is not None:
        raise ConfigError(
            f"format={form}: the run {cfg.name} trained {', '.join(members)}; leave format out, then name "
            f"one of them: longtrain export format={form} artifact={folder}/MEMBER"
        )
    written = {}
    for name, (its_spec, its_config) in members.items():
        part = module.get_submodule(name)
        written[name] = _write(
            cfg, its_spec, its_config, part, target=target, folder=folder / name, facts=facts
        )
    _refuse_unverified(cfg, [*written.values()])
    for name, artifact in written.items():
        if cfg.push:
            push.push(cfg, artifact, f"{cfg.push}-{name}")


def _write(
    cfg: DictConfig,
    spec: MethodSpec,
    config: Any,
    module: nn.Module,
    *,
    target: Target,
    folder: Path,
    facts: dict[str, Any],
) -> Artifact:
    """A module as an artifact, compared and read back, with a card that says what its run has shown.

    A comparison that fails is noted in what is written: nobody loses a training to it.

    Raises:
        ArtifactError: a weight is no number, or the disk is full.
    """
    from longtrain.artifact import Artifact
    from longtrain.jobs.exporting.evidence import gather

    log.info("recording golden outputs of %s with the target, and comparing it with them", spec.name)
    made = Artifact.from_module(spec.name, config, module=module, target=target, provenance=facts)
    made = dataclasses.replace(made, lenient=True)
    compare(spec, config, module, target=target, artifact=made)
    made.save(folder)
    artifact = Artifact.load(folder, unverified=True)
    evidence, pictures = gather(Path(cfg.run_dir), artifact.checksum())
    artifact.describe(evidence, pictures=pictures)
    size = sum(file.stat().st_size for file in folder.iterdir())
    said = "exported=%s parameters=%d bytes=%d step=%d %s%s"
    verdict = f"verified: {artifact.verification.summary()}" if artifact.verified else "UNVERIFIED"
    unfinished = f" unfinished: {facts['unfinished']}" if "unfinished" in facts else ""
    log.info(said, folder, artifact.parameters(), size, facts["step"], verdict, unfinished)
    return artifact


def _refuse_unverified(cfg: DictConfig, artifacts: Sequence[Artifact]) -> None:
    """End with an error where an artifact is on disk and a comparison failed; `unverified` warns instead.

    Raises:
        ArtifactError: what failed, with its numbers, and how to look closer.
    """
    if failed := [artifact for artifact in artifacts if not artifact.verified]:
        first = failed[0]
        where = ", ".join(str(artifact.folder) for artifact in failed)
        said = (
            f"{where} is written but not verified: {first.verification.faults[0]}; look closer: longtrain "
            f"inspect {first.folder}"
        )
        if not convert(cfg.unverified, bool, "unverified"):
            raise ArtifactError(said)
        log.warning("%s", said)


def _unfinished(cfg: DictConfig, saved: Saved, trained: Path) -> str:
    """How far a run came that was cut short, as `step 2 of 6`; empty: it came to its end.

    A run ends at its last step, or earlier where a callback stopped it; it then has a summary of that step.

    Raises:
        ConfigError: it was cut short, and `unfinished=true` is not passed.
    """
    planned = saved.facts.get("trainer.max_steps")
    if not isinstance(planned, int) or saved.step >= planned:
        return ""
    try:
        if read_json(trained / "summary.json")["steps"] == saved.step:
            return ""
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no summary is written before the end
    if not convert(cfg.get("unfinished", False), bool, "unfinished"):
        raise ConfigError(
            f"the run {cfg.name} is at step {saved.step} of {planned}: it was cut short; the same longtrain "
            "train goes on, or pass unfinished=true to export it as it is, which its card then says"
        )
    return f"step {saved.step} of {planned}"


def _settings(trained: Path, cfg: DictConfig) -> dict[str, Any]:
    """The configuration of the training run: what was trained is exported, whatever the command says now."""
    try:
        settings = provenance.read_config(trained)
        from_file(_Settings, settings)
        name = str(settings["method"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{trained / 'config.yaml'} is missing or damaged: {' '.join(str(error).split())}; train again"
        ) from None
    if cfg.method is not None and str(cfg.method.name) != name:
        raise ConfigError(
            f"{trained} was trained with method={name}, not {cfg.method.name}; leave method out"
        )
    return settings


def _config(spec: MethodSpec, values: dict[str, Any]) -> Any:
    """The method's own fields of a saved `method` group.

    Raises:
        ArtifactError: a field is unknown, or has a value that is not allowed.
    """
    values = methods.without_gone({key: value for key, value in values.items() if key != "name"})
    unknown = sorted({*values} - {field.name for field in dataclasses.fields(spec.config)})
    if unknown:
        raise ArtifactError(
            f"the run was trained by another longtrain: method {spec.name} has no {unknown[0]}"
        )
    try:
        return spec.config(**values)
    except (TypeError, ConfigError) as error:
        raise ArtifactError(f"config.yaml of the run is damaged: {first_line(error)}; train again") from None


def _same_settings(saved: Saved, method: dict[str, Any], trained: Path) -> None:
    """`config.yaml` says of the method what the checkpoint remembers of its training."""
    from longtrain.training.checkpoint import differences, flat

    known = {key: value for key, value in saved.facts.items() if key.startswith("method.")}
    if changed := differences(provenance.redact(known), flat({"method": method})):
        raise ArtifactError(
            f"{trained / 'config.yaml'} is not what {saved.path} was trained with ({changed}); "
            f"put the old values back in that file, or train again"
        )


def _same_target(saved: Saved, target: Target) -> None:
    """The target at hand has the weights and the tokenizer that the checkpoint was trained on."""
    for key, found in (("weights", target.info.weights_hash), ("tokenizer", target.info.tokenizer_hash)):
        trained_on = saved.facts.get(f"target.{key}")
        if found and trained_on and found != trained_on:
            raise ArtifactError(
                f"{saved.path} was trained on a target with {key} {trained_on}, {target.info.name} has "
                f"{found}; pass the target it was trained on, target.path={saved.facts.get('target.name')}"
            )


def _facts(trained: Path, settings: dict[str, Any], *, home: Path, step: int, trust: bool) -> dict[str, Any]:
    """Provenance of the training run with its data's sources, and of this export.

    With `trust` a run whose record is damaged is exported too; its artifact names the record as unchecked.
    """
    file = trained / "provenance.json"
    facts: dict[str, Any] = {}
    try:
        facts = from_file(dict[str, Any], read_json(file))
        old = [] if CHECKSUM in facts else [str(file)]  # of an earlier longtrain
        facts = facts if old else read_sealed(file)
        from_file(dict[str, Any] | None, facts.get("data"))
        old += from_file(list[str], facts.get("unchecked") or [])
    except (OSError, ValueError) as error:
        if not trust:
            raise ArtifactError(
                f"{file} cannot be read: {error}; put the old file back, or pass unverified=true: the "
                "artifact is then exported without a word on its data"
            ) from None
        facts, old = {}, [str(file)]
    data = facts.get("data") or {}
    manifest = _manifest(home, data)
    facts |= {"data": {**data, "sources": _sources(manifest)}, "step": step, "export": provenance.gather()}
    if found := [*old, *(manifest.get("unchecked") or [])]:
        facts["unchecked"] = found
    return facts


def _manifest(home: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the data that a run was trained on; empty if it is gone."""
    made = sorted((home / "data").glob(f"{escape(str(data.get('name')))}-*/manifest.json"))
    for manifest in (read_manifest(file.parent) for file in made):
        if manifest is not None and manifest["sha256"] == data.get("sha256"):
            return manifest
    return {}


def _sources(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the training text is from and under which licences, as the manifest of the data says."""
    items = manifest.get("sources") or []
    texts = [str(item["source"]["where"]) for item in items if _is_text(item["source"])]
    return [entry for item in items for entry in _entries(item, texts)]


def _is_text(source: dict[str, Any]) -> bool:
    """Whether synthetic sources write into its text: running text that is trained on."""
    rows_of_text = source["reader"] == "jsonl" and source.get("adapter") in (None, "", "text")
    return (source["reader"] == "text" or rows_of_text) and source.get("split") != "val"


def _entries(item: dict[str, Any], texts: list[str]) -> list[dict[str, Any]]:
    """A source of prepared data as lines of the model card; synthetic ones are written into `texts`."""
    source, inputs = item["source"], item["inputs"]
    kind = source.get("kind")
    if "parts" in inputs:
        return [
            {"id": p["hub"], "revision": p["commit"], "kind": p["kind"] or kind, "license": p["licence"]}
            for p in inputs["parts"]
        ]
    files = inputs.get("files") or ()
    name = str(source["where"]) if files else f"{source['reader']} {source['where']}"
    if "synthetic" in inputs and texts:
        name += f", written into {', '.join(texts)}"
    licence = "public domain, see bundled/text/README.md" if name.startswith("bundled:") else None
    return [
        {"name": name, "kind": kind, "revision": f"{len(files)} files" if files else None, "license": licence}
    ]
