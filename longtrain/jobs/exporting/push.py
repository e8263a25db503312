"""Uploading what an export wrote, and adding what its run has shown to its card."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain.assets import bundled_artifacts
from longtrain.errors import ConfigError
from longtrain.files import write_files
from longtrain.jobs.setup import load_artifact
from longtrain.log import get_logger
from longtrain.provenance import without_folders
from longtrain.settings import Text, convert
from longtrain.targets.at_hand import CARD, HUB_FILES

if TYPE_CHECKING:
    from torch import nn

    from longtrain.artifact import Artifact
    from longtrain.methods.spec import MethodSpec

log = get_logger(__name__)

PICTURES = "*.png"


def check(cfg: DictConfig) -> None:
    """Refuse, before any work, what `push` could not do; asks nobody.

    Raises:
        ConfigError: no repository name, offline, or not logged in.
    """
    from longtrain.artifact.hub import check_push

    check_push(str(cfg.push), _visibility(cfg)["collection"])


def push(cfg: DictConfig, artifact: Artifact, repo: str) -> None:
    """Upload an artifact."""
    log.info("pushed=%s", artifact.push(repo, **_visibility(cfg)))


def push_folder(cfg: DictConfig, folder: Path, patterns: Sequence[str]) -> None:
    """Upload a folder of another kind, with its card and pictures."""
    from longtrain.artifact.hub import upload

    where = upload(folder, str(cfg.push), patterns=[*patterns, CARD, PICTURES], **_visibility(cfg))
    log.info("pushed=%s", where)


def again(cfg: DictConfig, where: str) -> None:
    """Upload an artifact that was exported before, with what its run has measured since; loads no target.

    Raises:
        ConfigError: it is not on this machine.
    """
    from longtrain.jobs.exporting.evidence import gather

    checkpoints = Path(cfg.home) / "checkpoints"
    if not (Path(where).exists() or (checkpoints / where).exists() or where in bundled_artifacts()):
        raise ConfigError(f"artifact={where} and push={cfg.push}; push takes a folder of this machine")
    artifact = load_artifact(where, cfg)
    assert artifact.folder is not None
    folder, run_dir = artifact.folder.resolve(), Path(cfg.run_dir)
    if folder.is_relative_to(checkpoints.resolve()):
        run_dir = Path(cfg.home) / "runs" / folder.relative_to(checkpoints.resolve()).parts[0]
    evidence, pictures = gather(run_dir, artifact.checksum()) if run_dir.is_dir() else (None, {})
    with TemporaryDirectory() as place:
        if folder in (shipped.resolve() for shipped in bundled_artifacts().values()):
            copy = shutil.copytree(folder, Path(place) / folder.name)  # what is installed stays as it is
            artifact = dataclasses.replace(artifact, folder=copy)
        artifact.describe(evidence, pictures=pictures, licence=licence(cfg))
        push(cfg, artifact, str(cfg.push))


def target(
    cfg: DictConfig,
    spec: MethodSpec,
    config: Any,
    module: nn.Module,
    *,
    folder: Path,
    facts: dict[str, Any],
) -> None:
    """Write a target that was trained, read it back, and upload it if asked."""
    from longtrain.artifact.card import appended
    from longtrain.jobs.exporting.evidence import gather
    from longtrain.targets.loading import load_target

    assert spec.export is not None
    facts = without_folders(facts)
    spec.export(module, config, folder, facts)
    log.info("exported=%s%s", folder, f" unfinished: {said}" if (said := facts.get("unfinished")) else "")
    evidence, pictures = gather(Path(cfg.run_dir), load_target(folder).info.weights_hash)
    card = appended((folder / CARD).read_text(encoding="utf-8"), facts, evidence, [*pictures])
    write_files(folder, {CARD: card.encode(), **pictures})
    if cfg.push:
        push_folder(cfg, folder, HUB_FILES)


def licence(cfg: DictConfig) -> str | None:
    """The licence that the command states for the module; None: it states none."""
    stated: str | None = convert(cfg.get("licence"), Text | None, "licence")
    return stated


def _visibility(cfg: DictConfig) -> dict[str, Any]:
    """Whether what `push` makes is private, and the collection that it goes into."""
    private = convert(cfg.get("private", True), bool, "private")
    return {"private": private, "collection": convert(cfg.get("collection"), Text | None, "collection")}
