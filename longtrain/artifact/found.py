"""Finds the folder of an artifact, or of a module in another tool's format that a method reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longtrain import methods
from longtrain.artifact.hub import download, endpoint
from longtrain.assets import MANIFEST, bundled_artifacts
from longtrain.errors import ArtifactError
from longtrain.folders import finish_replacement
from longtrain.methods.spec import Imported, MethodSpec

HUB = "hub:"


def find(where: str | Path, home: Path, *, patterns: Sequence[str]) -> Path:
    """Return the folder of an artifact, or of a module in another tool's format.

    Args:
        where: a folder, a name under `home/checkpoints` or of `assets.bundled_artifacts`, or a Hub id
            (ORG/NAME, or hub:ORG/NAME, either with @REVISION).
        home: the folder that holds `checkpoints`.
        patterns: name patterns of an artifact's files, for a download.

    Raises:
        ArtifactError: nothing was found.
    """
    text = str(where)
    candidates = [] if text.startswith(HUB) else [Path(where), home / "checkpoints" / text]
    candidates = [folder for folder in candidates if _can_be(folder)]
    for folder in candidates:
        if not folder.exists() or (folder / MANIFEST).is_file():
            finish_replacement(folder)
        if (folder / MANIFEST).is_file() or reader_of(folder) is not None:
            return folder
    if text in (shipped := bundled_artifacts()) and not any(folder.exists() for folder in candidates):
        return shipped[text]
    for folder in candidates:
        if folder.exists():
            if parts := sorted(file.parent.name for file in folder.glob(f"*/{MANIFEST}")):
                raise ArtifactError(
                    f"{folder} holds an artifact for each of {', '.join(parts)}; name one: "
                    f"artifact={folder}/{parts[0]}"
                )
            raise ArtifactError(
                f"{folder} holds no {MANIFEST}, and nothing else that a method reads ({_known()}); run: "
                "longtrain export"
            )
    names = sorted(p.parent.name for p in (home / "checkpoints").glob(f"*/{MANIFEST}"))
    text = text.removeprefix(HUB)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        repo, _, revision = text.partition("@")
        looked = f"not a folder, not under checkpoints/ (there: {', '.join(names) or 'none'}), and "
        folder = download(
            repo,
            revision=revision or None,
            patterns=[*patterns, *_patterns()],
            elsewhere="" if str(where).startswith(HUB) else looked,
        )
        if (folder / MANIFEST).is_file() or reader_of(folder) is not None:
            return folder
        raise ArtifactError(
            f"{text} on {endpoint()} is no longtrain artifact: it has no {MANIFEST}, and nothing else that "
            f"a method reads ({_known()})"
        )
    if str(where).startswith(HUB):
        raise ArtifactError(
            f"no artifact '{where}': a repository is {HUB}ORG/NAME, or {HUB}ORG/NAME@REVISION"
        )
    raise ArtifactError(
        f"no artifact '{where}': neither a folder nor a name under {home / 'checkpoints'} "
        f"(there: {', '.join(names) or 'none'}), nor one that ships with longtrain "
        f"({', '.join(sorted(shipped))}); run: longtrain export name={Path(where).name}"
    )


def _can_be(folder: Path) -> bool:
    """Return False if the system cannot have such a path (too long, or with a zero byte)."""
    try:
        return folder.exists() or "\0" not in str(folder)
    except OSError:
        return False


def reader_of(folder: Path) -> MethodSpec | None:
    """Return the method that reads a folder in another tool's format; None if there is none."""
    if not folder.is_dir() or (folder / MANIFEST).is_file():
        return None
    return next((spec for spec in _readers() if spec.formats and spec.formats.reads(folder)), None)


def imported(folder: Path, trained_by: str | None) -> tuple[str, Imported]:
    """Return the name of the method that reads a folder, and the module in it.

    Raises:
        ArtifactError: no method reads it, or the folder is damaged or does not state what was trained.
    """
    spec = reader_of(folder)
    if spec is None or spec.formats is None:
        raise ArtifactError(f"{folder} holds nothing that a method reads ({_known()})")
    return spec.name, spec.formats.read(folder, trained_by)


def _readers() -> list[MethodSpec]:
    """Return the methods that read folders in other tools' formats."""
    return [spec for spec in map(methods.get, methods.names()) if spec.formats is not None]


def _patterns() -> list[str]:
    """Return the name patterns of the files in such folders."""
    return [pattern for spec in _readers() if spec.formats for pattern in spec.formats.patterns]


def _known() -> str:
    """Describe the formats that each method reads."""
    listed = [f"{spec.name}: {', '.join(spec.formats.names)}" for spec in _readers() if spec.formats]
    return "; ".join(listed)
