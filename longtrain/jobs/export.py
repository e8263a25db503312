"""`longtrain export`: write a run's trained module as an artifact, verify it, and upload it if requested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods, provenance
from longtrain.assets import artifact_kind
from longtrain.data.packing.prepared import read_manifest
from longtrain.errors import ArtifactError, ConfigError, first_line
from longtrain.features.settings import FeatureSettings
from longtrain.files import read_json, read_sealed
from longtrain.jobs.exporting import formats, push
from longtrain.jobs.exporting.comparison import compare
from longtrain.jobs.setup import load_target, load_tensors
from longtrain.log import get_logger
from longtrain.settings import from_file
from longtrain.targets.at_hand import licence_of

if TYPE_CHECKING:
    from torch import nn

    from longtrain.artifact import Artifact
    from longtrain.artifact.golden import States
    from longtrain.config import RunConfig
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.model import Target
    from longtrain.targets.step import OutputRequest
    from longtrain.training.checkpoint import Saved

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class _Named:
    """The fields of a run's group `method` that export reads."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The fields of a run's group `target` that export reads."""

    path: str | None


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The fields of a run's stored configuration that export reads."""

    method: _Named
    target: _Placed | None = None
    features: FeatureSettings = FeatureSettings()


def run(cfg: RunConfig) -> None:
    """Export the last checkpoint of the run `cfg.name`, or write a named artifact in another `format`.

    If several methods were trained together, each becomes an artifact in a folder of its own.

    Raises:
        ConfigError: nothing was trained under this name or with this method, or the format is unknown or
            cannot represent the module.
        ArtifactError: the checkpoint is damaged or of another module, other settings or another target, or
            the disk is full; or the artifact is marked as unverified, since a comparison failed.
    """
    from longtrain.training import checkpoint

    if cfg.export.verify is not None:
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
    trained = cfg.run_dir / "train"
    path = checkpoint.find(trained / "checkpoints", "auto")
    if path is None:
        where = trained / "checkpoints"
        raise ConfigError(f"nothing was trained under name={cfg.name}: no checkpoint in {where}; train first")
    saved = checkpoint.read(path)
    unfinished = _unfinished(cfg, saved, trained)
    settings = _settings(trained, cfg)
    spec = methods.get(str(settings["method"]["name"]))
    config = _config(spec, settings["method"])
    facts = _facts(trained, settings, home=cfg.home, step=saved.step, trust=cfg.unverified)
    facts["license"] = cfg.export.licence
    if unfinished:
        facts["unfinished"] = unfinished
    tensors = checkpoint.trained_tensors(path)
    folder = cfg.checkpoints / cfg.name
    _same_settings(saved, settings["method"], trained)
    if spec.export is not None:
        if form is not None:
            raise ConfigError(f"format={form}: method {spec.name} makes no artifact; leave format out")
        module = spec.build(config, None)
        load_tensors(module, tensors, str(path), "pass the settings of the run")
        push.target(cfg, spec, config, module, folder=folder, facts=facts)
        return
    single = spec.members is None
    for place in [folder] if spec.members is None else [folder / name for name in spec.members(config)]:
        artifact_kind(place).refuse_other(place)
    if form is not None and single:
        formats.check(spec.name, form, config, None)
    keeping = from_file(_Settings, settings).features
    if keeping.mode == "engine" and cfg.features.mode == "engine":
        keeping = dataclasses.replace(keeping, folder=cfg.features.folder)
    keeping.check_states()
    target = load_target(
        cfg.target,
        seed=cfg.seed,
        path=(settings.get("target") or {}).get("path"),
        fuse=False,
        layers=keeping.mode != "engine",
    )
    _same_target(saved, target)
    if form is not None and single:
        formats.check(spec.name, form, config, target.info)
    module = spec.build(config, target.info)
    load_tensors(module, tensors, str(path), "pass the settings of the run")
    module = module.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    facts["target_license"] = licence_of(str(target.info.name))
    if spec.members is None:
        states = None
        if keeping.mode == "engine":
            from longtrain.features.engine import EngineStates

            states = EngineStates(Path(str(keeping.folder)), target, keeping.layer_ids).example
            facts["states"] = "engine"
        artifact = _write(cfg, spec, config, module, target=target, folder=folder, facts=facts, states=states)
        _refuse_unverified(cfg, [artifact])
        if form is not None:
            formats.write(cfg, form, str(folder), target=target)
        elif cfg.push:
            push.push(cfg, artifact, cfg.push)
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
    cfg: RunConfig,
    spec: MethodSpec,
    config: Any,
    module: nn.Module,
    *,
    target: Target,
    folder: Path,
    facts: dict[str, Any],
    states: Callable[[OutputRequest, int], States] | None = None,
) -> Artifact:
    """Write a module as an artifact with a card of its run's results, read it back and compare.

    A failed comparison is recorded in the artifact instead of raised, so that the trained weights are not
    lost.

    Raises:
        ArtifactError: a weight is not finite, or the disk is full.
    """
    from longtrain.artifact import Artifact
    from longtrain.jobs.exporting.evidence import gather

    by = "the target" if states is None else "an engine's states, and no target"
    log.info("recording golden outputs of %s with %s, and comparing it with them", spec.name, by)
    made = Artifact.from_module(
        spec.name, config, module=module, target=target, provenance=facts, states=states
    )
    made = dataclasses.replace(made, lenient=True)
    compare(spec, config, module, target=target, artifact=made)
    made.save(folder)
    artifact = Artifact.load(folder, unverified=True)
    evidence, pictures = gather(cfg.run_dir, artifact.checksum())
    artifact.describe(evidence, pictures=pictures)
    size = sum(file.stat().st_size for file in folder.iterdir())
    message = "exported=%s parameters=%d bytes=%d step=%d %s%s"
    verdict = f"verified: {artifact.verification.summary()}" if artifact.verified else "UNVERIFIED"
    unfinished = f" unfinished: {facts['unfinished']}" if "unfinished" in facts else ""
    log.info(message, folder, artifact.parameters(), size, facts["step"], verdict, unfinished)
    return artifact


def _refuse_unverified(cfg: RunConfig, artifacts: Sequence[Artifact]) -> None:
    """Raise if a written artifact failed a comparison; with `unverified=true`, warn instead."""
    if failed := [artifact for artifact in artifacts if not artifact.verified]:
        first = failed[0]
        where = ", ".join(str(artifact.folder) for artifact in failed)
        message = (
            f"{where} is written but not verified: {first.verification.faults[0]}; look closer: longtrain "
            f"inspect {first.folder}"
        )
        if not cfg.unverified:
            raise ArtifactError(message)
        log.warning("%s", message)


def _unfinished(cfg: RunConfig, saved: Saved, trained: Path) -> str:
    """Progress of an interrupted run, as `step 2 of 6`; empty if it ran to its end.

    A run ends at its last step, or earlier if a callback stopped it, in which case a summary of that step
    exists.
    """
    planned = saved.facts.get("trainer.max_steps")
    if not isinstance(planned, int) or saved.step >= planned:
        return ""
    try:
        if read_json(trained / "summary.json")["steps"] == saved.step:
            return ""
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the summary is written at the end only
    if not cfg.export.unfinished:
        raise ConfigError(
            f"the run {cfg.name} is at step {saved.step} of {planned}: it was cut short; the same longtrain "
            "train goes on, or pass unfinished=true to export it as it is, which its card then states"
        )
    return f"step {saved.step} of {planned}"


def _settings(trained: Path, cfg: RunConfig) -> dict[str, Any]:
    """The stored configuration of the training run, which determines what is exported, not the current
    command.
    """
    try:
        settings = provenance.read_config(trained)
        from_file(_Settings, settings)
        name = str(settings["method"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{trained / 'config.yaml'} is missing or damaged: {' '.join(str(error).split())}; train again"
        ) from None
    if cfg.method is not None and cfg.method.name != name:
        raise ConfigError(
            f"{trained} was trained with method={name}, not {cfg.method.name}; leave method out"
        )
    return settings


def _config(spec: MethodSpec, values: dict[str, Any]) -> Any:
    """Parse the method's own fields of a stored `method` group."""
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
    """Check that the method's settings in `config.yaml` equal those stored in the checkpoint."""
    from longtrain.training.checkpoint import differences, flat

    known = {key: value for key, value in saved.facts.items() if key.startswith("method.")}
    if changed := differences(provenance.redact(known), flat({"method": method})):
        raise ArtifactError(
            f"{trained / 'config.yaml'} is not what {saved.path} was trained with ({changed}); "
            f"put the old values back in that file, or train again"
        )


def _same_target(saved: Saved, target: Target) -> None:
    """Check that the target has the weights and the tokenizer that the checkpoint was trained on."""
    for key, found in (("weights", target.info.known_weights), ("tokenizer", target.info.tokenizer_hash)):
        trained_on = saved.facts.get(f"target.{key}")
        if found and trained_on and found != trained_on:
            raise ArtifactError(
                f"{saved.path} was trained on a target with {key} {trained_on}, {target.info.name} has "
                f"{found}; pass the target it was trained on, target.path={saved.facts.get('target.name')}"
            )


def _facts(trained: Path, settings: dict[str, Any], *, home: Path, step: int, trust: bool) -> dict[str, Any]:
    """Provenance of the training run (including the sources of its data) and of this export.

    With `trust`, a run with a damaged provenance file is exported too; its artifact lists the file as
    unchecked.
    """
    file = trained / "provenance.json"
    facts: dict[str, Any] = {}
    try:
        facts = read_sealed(file)
        from_file(dict[str, Any] | None, facts.get("data"))
    except (OSError, ValueError) as error:
        if not trust:
            raise ArtifactError(
                f"{file} cannot be read: {error}; put the old file back, or pass unverified=true: the "
                "artifact is then exported without a word on its data"
            ) from None
        facts = {"unchecked": [str(file)]}
    data = facts.get("data") or {}
    manifest = _manifest(home, data)
    facts |= {"data": {**data, "sources": _sources(manifest)}, "step": step, "export": provenance.gather()}
    return facts


def _manifest(home: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the data that a run was trained on; empty if it no longer exists."""
    made = sorted((home / "data").glob(f"{escape(str(data.get('name')))}-*/manifest.json"))
    for manifest in (read_manifest(file.parent) for file in made):
        if manifest is not None and manifest["sha256"] == data.get("sha256"):
            return manifest
    return {}


def _sources(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Sources of the training text and their licences, from the data's manifest."""
    items = manifest.get("sources") or []
    texts = [str(item["source"]["where"]) for item in items if _is_text(item["source"])]
    return [entry for item in items for entry in _entries(item, texts)]


def _is_text(source: dict[str, Any]) -> bool:
    """True if a source is running text that is trained on, into which synthetic sources write."""
    rows_of_text = source["reader"] == "jsonl" and source.get("adapter") in (None, "", "text")
    return (source["reader"] == "text" or rows_of_text) and source.get("split") != "val"


def _entries(item: dict[str, Any], texts: list[str]) -> list[dict[str, Any]]:
    """A source of prepared data as entries of the model card; for synthetic ones, `texts` are the texts they
    write into.
    """
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
