"""Folders in formats of serving engines: writing one from a run or an artifact, and checking anybody's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import methods
from longtrain.assets import bundled_artifacts
from longtrain.errors import ArtifactError, ConfigError
from longtrain.files import write_files
from longtrain.folders import FolderKind, replaced_folder
from longtrain.jobs.exporting import push
from longtrain.jobs.setup import artifact_names, load_artifact, load_target_from
from longtrain.log import get_logger
from longtrain.provenance import without_folders
from longtrain.settings import wrong
from longtrain.targets.at_hand import CARD

if TYPE_CHECKING:
    from longtrain.methods.spec import Formats
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

log = get_logger(__name__)

OURS = "longtrain"
"""The folder in such a folder that says that longtrain wrote it."""
ENGINE = FolderKind(
    "a folder for engines",
    (OURS,),
    ("*.json", "*.safetensors", "*.py", CARD, "*.png", f"{OURS}/*"),
)


def asked(cfg: DictConfig) -> str | None:
    """The format that `cfg.format` names; None: none is wanted.

    Raises:
        ConfigError: no method has such a format.
    """
    if cfg.format is None:
        return None
    if cfg.format not in _names():
        raise wrong("format", cfg.format, ", ".join(_names()))
    return str(cfg.format)


def source(cfg: DictConfig) -> str | None:
    """The artifact to write in a format; None: the run `cfg.name` is exported first.

    Raises:
        ConfigError: several artifacts are named.
    """
    from longtrain.training import checkpoint

    names = artifact_names(cfg)
    if len(names) > 1:
        raise ConfigError(f"artifact={names}; export writes one of them at a time in a format")
    own = Path(cfg.home) / "checkpoints" / str(cfg.name)
    if names and Path(names[0]).absolute() != own.absolute() and names[0] != cfg.name:
        return names[0]
    if checkpoint.find(Path(cfg.run_dir) / "train" / "checkpoints", "auto") is not None:
        return None
    if not own.is_dir():
        return names[0] if names and names[0] in bundled_artifacts() else None
    return str(own)


def write(cfg: DictConfig, form: str, where: str, *, target: Target | None = None) -> None:
    """Write an artifact as the folder `checkpoints/NAME-FORMAT`, whole or not at all, and check it.

    NAME is the artifact's place under `checkpoints`, with `-` for `/`: `runA/eagle3` becomes `runA-eagle3`.

    Args:
        cfg: the resolved configuration.
        form: the format.
        where: the artifact: a folder, a name or a Hub id; or another tool's folder.
        target: the frozen target; None: as `cfg.target` or the artifact says.

    Raises:
        ConfigError: the method has no such format, or an engine that reads it would drop something silently.
        ArtifactError: what was written is not what was meant.
        LongtrainError: another folder is in the way.
        TargetMismatchError: another target.
    """
    from longtrain.artifact.card import appended, licensed, unverified
    from longtrain.artifact.evidence import Evidence

    if cfg.push:
        push.check(cfg)
    artifact = load_artifact(where, cfg)
    formats = _formats(artifact.method, form)
    formats.refuse(form, artifact.typed_config(), None)
    target = target or load_target_from(cfg, path=artifact.target.name, fuse=False)
    artifact.build(target)
    folder = Path(cfg.home) / "checkpoints" / f"{_name(where, Path(cfg.home) / 'checkpoints')}-{form}"
    ENGINE.refuse_other(folder)
    config, made = artifact.typed_config(), artifact.folder
    facts = {**artifact.provenance, "license": push.licence(cfg) or artifact.provenance.get("license")}
    assert made is not None
    files = formats.write(form, artifact.tensors, config, target, facts, str(cfg.push or folder.name))
    pictures = {file.name: file.read_bytes() for file in sorted(made.glob("*.png"))}
    card = licensed(files[CARD].decode(), facts)
    card = appended(card, without_folders(facts), Evidence.of_folder(made), [*pictures])
    if not artifact.verified:
        card += f"\n## Unverified\n\n{unverified(artifact.verification)}\n"
    files |= {CARD: card.encode(), **pictures}
    if cfg.push:
        _check_names(files, target)
    with replaced_folder(folder, ENGINE) as fresh:
        write_files(fresh, files)
        formats.verify(fresh, None, None)
    log.info("exported=%s format=%s bytes=%d", folder, form, sum(map(len, files.values())))
    if cfg.push:
        push.push_folder(cfg, folder, formats.patterns)


def check(method: str, form: str, config: Any, info: TargetInfo | None) -> None:
    """Refuse a format before anything is written.

    Args:
        method: the method's name.
        form: the format.
        config: the method's hyperparameters.
        info: the target; None: it is not at hand yet, so what depends on it is not checked.

    Raises:
        ConfigError: the method has no such format, or an engine that reads it would drop something silently.
    """
    _formats(method, form).refuse(form, config, info)


def verify(cfg: DictConfig) -> None:
    """Check the folder `cfg.verify`: by its own record, by what engines need and, with a target, on a text.

    Raises:
        ArtifactError: something is wrong with it; the line says what.
        ConfigError: no method reads it.
    """
    from longtrain.artifact.found import reader_of
    from longtrain.assets import MANIFEST

    folder = Path(str(cfg.verify))
    if not folder.is_dir():
        raise ConfigError(
            f"verify={folder} is no folder; pass one that longtrain export format=... wrote, or another's"
        )
    if (folder / MANIFEST).is_file():
        artifact = load_artifact(str(folder), cfg)
        artifact.attach(load_target_from(cfg, path=artifact.target.name, fuse=False))
        log.info("verified=%s method=%s files and golden outputs", folder, artifact.method)
        return
    spec = reader_of(folder)
    if spec is None or spec.formats is None:
        raise ArtifactError(
            f"{folder} is neither an artifact nor in a format that is known ({', '.join(_names())})"
        )
    target = load_target_from(cfg, fuse=False) if cfg.target and cfg.target.path else None
    lines = spec.formats.verify(folder, target, cfg.get("trained_by"))
    log.info("verified=%s method=%s %s", folder, spec.name, "; ".join(lines))


def _name(where: str, checkpoints: Path) -> str:
    """The name of an artifact's folder in a format: its place under `checkpoints`, or its own name."""
    for folder in (Path(where), checkpoints / where):
        if folder.is_dir() and folder.resolve().is_relative_to(checkpoints.resolve()):
            return "-".join(folder.resolve().relative_to(checkpoints.resolve()).parts)
    return Path(where).resolve().name


def _check_names(files: dict[str, bytes], target: Target) -> None:
    """Refuse to upload a folder that names its target by a folder of this machine."""
    here = Path(target.info.name)
    if not here.exists():
        return
    named = [
        name
        for name, text in files.items()
        if name.endswith(".json") and str(here.absolute()).encode() in text
    ]
    if named:
        raise ConfigError(
            f"{named[0]} would name the target by a folder of this machine, {here.absolute()}, and be "
            "uploaded; pass "
            "the target by its Hub id, target.path=ORG/NAME, or leave push out"
        )


def _formats(method: str, form: str) -> Formats:
    """The formats of a method that must have this one."""
    formats = methods.get(method).formats
    if formats is None or form not in formats.names:
        refuse_method(method, form)
    assert formats is not None
    return formats


def refuse_method(method: str, form: str) -> None:
    """Refuse a format that a method does not have, and say what serves its artifacts instead.

    A training of several methods is passed over: the export names its members.

    Raises:
        ConfigError: what can be done.
    """
    spec = methods.get(method)
    if spec.members is not None:
        return
    having = [name for name, formats in methods.formats().items() if form in formats]
    said = f"format={form}: method {method} has no such format (of {', '.join(having)})"
    if spec.elsewhere:
        tools = " and ".join(spec.elsewhere)
        said += f"; {tools} can load its artifact as it is, see its README.md and docs/serving.md"
    elif spec.formats is not None:
        said += f"; it has {', '.join(spec.formats.names)}"
    raise ConfigError(f"{said}; leave format out")


def _names() -> list[str]:
    """The formats of all methods."""
    return sorted({name for names in methods.formats().values() for name in names})
