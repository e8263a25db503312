"""Formats of serving engines: writing such a folder from a run or an artifact, and checking existing ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.assets import bundled_artifacts
from longtrain.errors import ArtifactError, ConfigError
from longtrain.files import write_files
from longtrain.folders import FolderKind, replaced_folder
from longtrain.jobs.exporting import push
from longtrain.jobs.setup import load_artifact, load_target
from longtrain.log import get_logger
from longtrain.provenance import without_folders
from longtrain.settings import wrong
from longtrain.targets.at_hand import CARD

if TYPE_CHECKING:
    from longtrain.config import RunConfig
    from longtrain.methods.spec import Formats
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

log = get_logger(__name__)

OURS = "longtrain"
"""Name of the subfolder that marks a folder as written by longtrain."""
ENGINE = FolderKind(
    "a folder for engines",
    (OURS,),
    ("*.json", "*.safetensors", "*.py", CARD, "*.png", f"{OURS}/*"),
)


def asked(cfg: RunConfig) -> str | None:
    """The format named by `format=`, or None.

    Raises:
        ConfigError: no method has this format.
    """
    form: str | None = cfg.export.format
    if form is not None and form not in _names():
        raise wrong("format", form, ", ".join(_names()))
    return form


def source(cfg: RunConfig) -> str | None:
    """The artifact to write in the format, or None if the run `cfg.name` is to be exported first.

    Raises:
        ConfigError: several artifacts are named.
    """
    from longtrain.training import checkpoint

    names = cfg.artifacts
    if len(names) > 1:
        raise ConfigError(f"artifact={[*names]}; export writes one of them at a time in a format")
    own = cfg.checkpoints / cfg.name
    if names and Path(names[0]).absolute() != own.absolute() and names[0] != cfg.name:
        return names[0]
    if checkpoint.find(cfg.run_dir / "train" / "checkpoints", "auto") is not None:
        return None
    if not own.is_dir():
        return names[0] if names and names[0] in bundled_artifacts() else None
    return str(own)


def write(cfg: RunConfig, form: str, where: str, *, target: Target | None = None) -> None:
    """Write an artifact in a format as the folder `checkpoints/NAME-FORMAT`, atomically, and check it.

    NAME is the artifact's path under `checkpoints`, with `-` for `/`: `runA/eagle3` becomes `runA-eagle3`.

    Args:
        cfg: the configuration.
        form: the format's name.
        where: the artifact: a folder, a name or a Hub id; or another tool's folder.
        target: the frozen target; None: the one named by `cfg.target` or the artifact.

    Raises:
        ConfigError: the method has no such format, or an engine would silently ignore part of the module.
        ArtifactError: the written folder does not reproduce the artifact.
        LongtrainError: another folder exists at this path.
        TargetMismatchError: the target is another one.
    """
    from longtrain.artifact.card import appended, licensed, unverified
    from longtrain.artifact.evidence import Evidence

    if cfg.push:
        push.check(cfg)
    artifact = load_artifact(where, cfg.artifact_source)
    formats = _formats(artifact.method, form)
    formats.refuse(form, artifact.typed_config(), None)
    whole = "ends" not in artifact.target.extra
    target = target or load_target(
        cfg.target, seed=cfg.seed, path=artifact.target.name, fuse=False, layers=whole
    )
    artifact.build(target)
    folder = cfg.checkpoints / f"{_name(where, cfg.checkpoints)}-{form}"
    ENGINE.refuse_other(folder)
    config, made = artifact.typed_config(), artifact.folder
    facts = {**artifact.provenance, "license": cfg.export.licence or artifact.provenance.get("license")}
    assert made is not None
    files = formats.write(form, artifact.tensors, config, target, facts, cfg.push or folder.name)
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
    """Refuse an unsupported format before anything is written.

    Args:
        method: the method's name.
        form: the format's name.
        config: the method's hyperparameters.
        info: the target; None: not available yet, so checks that depend on it are skipped.

    Raises:
        ConfigError: the method has no such format, or an engine would silently ignore part of the module.
    """
    _formats(method, form).refuse(form, config, info)


def verify(cfg: RunConfig) -> None:
    """Check the folder of `verify=`: its own hashes, the engines' requirements and, with a target, its output
    on a text.

    Raises:
        ArtifactError: a check failed; the message names it.
        ConfigError: no method reads this format.
    """
    from longtrain.artifact.found import reader_of
    from longtrain.assets import MANIFEST

    folder = Path(str(cfg.export.verify))
    if not folder.is_dir():
        raise ConfigError(
            f"verify={folder} is no folder; pass one that longtrain export format=... wrote, or another's"
        )
    if (folder / MANIFEST).is_file():
        artifact = load_artifact(str(folder), cfg.artifact_source)
        artifact.attach(load_target(cfg.target, seed=cfg.seed, path=artifact.target.name, fuse=False))
        log.info("verified=%s method=%s files and golden outputs", folder, artifact.method)
        return
    spec = reader_of(folder)
    if spec is None or spec.formats is None:
        raise ArtifactError(
            f"{folder} is neither an artifact nor in a format that is known ({', '.join(_names())})"
        )
    target = load_target(cfg.target, seed=cfg.seed, fuse=False) if cfg.target.path else None
    lines = spec.formats.verify(folder, target, cfg.trained_by)
    log.info("verified=%s method=%s %s", folder, spec.name, "; ".join(lines))


def _name(where: str, checkpoints: Path) -> str:
    """The name of an artifact's folder in a format: its path under `checkpoints`, or its own name."""
    for folder in (Path(where), checkpoints / where):
        if folder.is_dir() and folder.resolve().is_relative_to(checkpoints.resolve()):
            return "-".join(folder.resolve().relative_to(checkpoints.resolve()).parts)
    return Path(where).resolve().name


def _check_names(files: dict[str, bytes], target: Target) -> None:
    """Refuse to upload a folder whose files contain a local path of the target."""
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
    """The `Formats` of a method, which must include this format."""
    formats = methods.get(method).formats
    if formats is None or form not in formats.names:
        refuse_method(method, form)
    assert formats is not None
    return formats


def refuse_method(method: str, form: str) -> None:
    """Refuse a format that the method does not have, and name an alternative.

    A joint training of several methods passes: the export itself names its members.

    Raises:
        ConfigError: the method does not have the format; the message gives an alternative.
    """
    spec = methods.get(method)
    if spec.members is not None:
        return
    having = [name for name, formats in methods.formats().items() if form in formats]
    message = f"format={form}: method {method} has no such format (of {', '.join(having)})"
    if spec.elsewhere:
        tools = " and ".join(spec.elsewhere)
        message += f"; {tools} can load its artifact as it is, see its README.md and docs/serving.md"
    elif spec.formats is not None:
        message += f"; it has {', '.join(spec.formats.names)}"
    raise ConfigError(f"{message}; leave format out")


def _names() -> list[str]:
    """The names of the formats of all methods."""
    return sorted({name for names in methods.formats().values() for name in names})
