"""Uploads exported artifacts, with the results of their run on the card."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from longtrain.assets import bundled_artifacts
from longtrain.errors import ConfigError
from longtrain.files import write_files
from longtrain.jobs.setup import load_artifact
from longtrain.log import get_logger
from longtrain.provenance import without_folders
from longtrain.targets.at_hand import CARD, HUB_FILES

if TYPE_CHECKING:
    from torch import nn

    from longtrain.artifact import Artifact
    from longtrain.config import RunConfig
    from longtrain.methods.spec import MethodSpec

log = get_logger(__name__)

PICTURES = "*.png"


def check(cfg: RunConfig) -> None:
    """Refuse uploads that cannot succeed, before any work and without network access.

    Raises:
        ConfigError: no repository name, offline, or not logged in.
    """
    from longtrain.artifact.hub import check_push

    check_push(str(cfg.push), cfg.export.collection)


def push(cfg: RunConfig, artifact: Artifact, repo: str) -> None:
    """Upload an artifact."""
    log.info("pushed=%s", artifact.push(repo, **_visibility(cfg)))


def push_folder(cfg: RunConfig, folder: Path, patterns: Sequence[str]) -> None:
    """Upload a folder in another tool's format, with its card and pictures."""
    from longtrain.artifact.hub import upload

    where = upload(folder, str(cfg.push), patterns=[*patterns, CARD, PICTURES], **_visibility(cfg))
    log.info("pushed=%s", where)


def again(cfg: RunConfig, where: str) -> None:
    """Upload an artifact that was exported earlier, with its run's newer measurements; loads no target.

    Raises:
        ConfigError: the artifact is not on this machine.
    """
    from longtrain.jobs.exporting.evidence import gather

    checkpoints = cfg.checkpoints
    if not (Path(where).exists() or (checkpoints / where).exists() or where in bundled_artifacts()):
        raise ConfigError(f"artifact={where} and push={cfg.push}; push takes a folder of this machine")
    artifact = load_artifact(where, cfg.artifact_source)
    assert artifact.folder is not None
    folder, run_dir = artifact.folder.resolve(), cfg.run_dir
    if folder.is_relative_to(checkpoints.resolve()):
        run_dir = cfg.home / "runs" / folder.relative_to(checkpoints.resolve()).parts[0]
    evidence, pictures = gather(run_dir, artifact.checksum()) if run_dir.is_dir() else (None, {})
    with TemporaryDirectory() as place:
        if folder in (shipped.resolve() for shipped in bundled_artifacts().values()):
            copy = shutil.copytree(folder, Path(place) / folder.name)  # the installed copy stays unchanged
            artifact = dataclasses.replace(artifact, folder=copy)
        artifact.describe(evidence, pictures=pictures, licence=cfg.export.licence)
        push(cfg, artifact, str(cfg.push))


def target(
    cfg: RunConfig,
    spec: MethodSpec,
    config: Any,
    module: nn.Module,
    *,
    folder: Path,
    facts: dict[str, Any],
) -> None:
    """Write a trained target, read it back, and upload it if requested."""
    from longtrain.artifact.card import appended
    from longtrain.jobs.exporting.evidence import gather
    from longtrain.targets.loading import load_target

    assert spec.export is not None
    facts = without_folders(facts)
    spec.export(module, config, folder, facts)
    unfinished = facts.get("unfinished")
    log.info("exported=%s%s", folder, f" unfinished: {unfinished}" if unfinished else "")
    evidence, pictures = gather(cfg.run_dir, load_target(folder).info.weights_hash)
    card = appended((folder / CARD).read_text(encoding="utf-8"), facts, evidence, [*pictures])
    write_files(folder, {CARD: card.encode(), **pictures})
    if cfg.push:
        push_folder(cfg, folder, HUB_FILES)


def _visibility(cfg: RunConfig) -> dict[str, Any]:
    """Visibility of the repositories that `push` creates, and the collection to add them to."""
    return {"private": cfg.export.private, "collection": cfg.export.collection}
