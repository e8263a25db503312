"""Locates the files that ship beside the code: `conf`, `recipes`, `data_prep` and `bundled`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from longtrain.folders import FolderKind

ASSETS = ("conf", "recipes", "data_prep", "bundled")
MANIFEST = "longtrain.json"
"""Name of the file that marks a folder as an artifact."""
LOCAL = "local.json"
ARTIFACT = (MANIFEST, LOCAL, "model.safetensors", "golden.safetensors", "evidence.json", "README.md", "*.png")
"""File names of every artifact; a manifest lists further files, written for other tools."""


def asset_dir(name: str) -> Path:
    """Return the folder of an asset: inside the installed wheel if it is there, else in the checkout.

    Args:
        name: one of `ASSETS`.

    Raises:
        ConfigError: the name is unknown, or the folder is missing from the installation.
    """
    if name not in ASSETS:
        raise ConfigError(f"unknown asset folder '{name}'; known: {', '.join(ASSETS)}")
    package = Path(__file__).resolve().parent
    for folder in (package / "_assets" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"asset folder '{name}' is missing from this installation; "
        "run: pip install --force-reinstall longtrain"
    )


def bundled_artifacts() -> dict[str, Path]:
    """Return the artifacts for the bundled target that ship with the package, as name -> folder."""
    return {file.parent.name: file.parent for file in asset_dir("bundled").glob(f"artifacts/*/{MANIFEST}")}


def manifest_of(name: str, checkpoints: Path) -> Path | None:
    """Return the manifest of an artifact on this machine, by its folder or name; None if there is none."""
    places = (Path(name), checkpoints / name, bundled_artifacts().get(name))
    files = (place / MANIFEST for place in places if place is not None)
    return next((file for file in files if file.is_file()), None)


def artifact_kind(folder: Path, names: Iterable[str] = ()) -> FolderKind:
    """Return the `FolderKind` of an artifact: the file that identifies it and the files that may be replaced.

    Args:
        folder: folder of an older artifact, whose manifest may list more files; it need not exist.
        names: further files that do not prevent the folder from being replaced.
    """
    from longtrain.files import read_sealed  # `longtrain --help` needs neither
    from longtrain.folders import FolderKind

    try:
        manifest = read_sealed(folder / MANIFEST)
        listed = [str(name) for name in manifest["files"] if "golden" in manifest]  # not in checkpoints
    except (OSError, ValueError, KeyError, TypeError):
        listed = []
    plain = [name for name in listed if not {*"*?["} & {*name}]
    return FolderKind("an artifact", (MANIFEST,), (*ARTIFACT, *names, *plain))
