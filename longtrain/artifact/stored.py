"""Files of an artifact as they are on disk, checked before anything is made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from longtrain.artifact.golden import FLOOR, Golden
from longtrain.artifact.golden_laws import DraftGolden
from longtrain.artifact.golden_rows import RowGolden
from longtrain.artifact.golden_scores import ScoreGolden
from longtrain.artifact.verification import Verification
from longtrain.assets import LOCAL, MANIFEST
from longtrain.errors import ArtifactError
from longtrain.files import impossible_number, read_bytes, read_json, read_sealed
from longtrain.settings import from_file

SCHEMA = 2
GOLDEN = "golden.safetensors"
LAWS = "laws"
KINDS: dict[str, type[Golden]] = {LAWS: DraftGolden, "scores": ScoreGolden, "rows": RowGolden}
"""Golden outputs of a draft, an evictor and a selector, by the manifest's name; it leaves out a draft's."""


@dataclass(frozen=True)
class _Stage:
    """What is read of a stage of the data."""

    doc_tokens: int | None = None


@dataclass(frozen=True)
class _Data:
    """What is read of the data that a module was trained on."""

    sources: list[Any] | dict[str, Any] | None = None
    stages: list[_Stage] | None = None


@dataclass(frozen=True)
class _Provenance:
    """What is read of where a module comes from; other keys may hold anything."""

    argv: list[str] | None = None
    git: dict[str, Any] | None = None
    data: _Data | None = None
    unchecked: list[str] | None = None


@dataclass(frozen=True)
class _Noise:
    """What is read of golden outputs beside their tensors."""

    noise: dict[str, float]


def read_manifest(path: Path) -> dict[str, Any]:
    """An artifact's manifest, its parts of the right types.

    Raises:
        ArtifactError: it cannot be read, was changed, is of another schema, or lacks something.
    """
    try:
        found = read_json(path)
        if isinstance(found, dict) and found.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{path} has schema {found.get('schema')!r}; this longtrain reads {SCHEMA}; export it again"
            )
        manifest = read_sealed(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; copy or export it again") from None
    kinds = {"method": str, "config": dict, "target": dict, "files": dict, "provenance": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(manifest.get(key), kind)]
    wrong += [key for key in ("golden", "verification") if key not in manifest]
    golden = manifest.get("golden")
    if golden is not None and not (isinstance(golden, dict) and isinstance(golden.get("dtype"), str)):
        wrong.append("golden")
    if wrong:
        raise ArtifactError(f"{path} lacks or misspells {', '.join(wrong)}; export it again")
    for key, kind in (("provenance", _Provenance), ("verification", Verification)):
        try:
            from_file(kind, manifest[key])
        except ValueError as error:
            raise ArtifactError(f"{path} has a wrong {key}.{error}; export it again") from None
    for key in ("config", "target"):
        if absurd := impossible_number(manifest[key], key):
            raise ArtifactError(f"{path} has {absurd}; export it again")
    return manifest


def local_target(folder: Path) -> str | None:
    """The folder or GGUF file that the target was loaded from, if it is still there."""
    try:
        where = read_sealed(folder / LOCAL)["target"]
        return where if Path(where).exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_tensors(path: Path, checksums: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ArtifactError: it is missing, damaged, or not the one that the manifest was written for.
    """
    try:
        content = read_bytes(path)
        tensors = load_tensors(content)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}; copy or export it again") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"{path} is damaged or cut short: {error}; copy or export it again") from None
    if hashlib.sha256(content).hexdigest() != checksums.get(path.name):
        raise ArtifactError(
            f"{path} is not what {MANIFEST} was written for (sha256 differs); copy or export it again"
        )
    return tensors


def read_golden(folder: Path, manifest: dict[str, Any]) -> Golden | None:
    """The recorded outputs, or None where the manifest names none.

    Raises:
        ArtifactError: they are damaged, or of a kind that is not known.
    """
    about = manifest["golden"]
    if about is None:
        return None
    kind = KINDS.get(about.get("kind", LAWS)) if isinstance(about.get("kind", LAWS), str) else None
    if kind is None or about["dtype"] not in FLOOR:
        raise ArtifactError(
            f"{folder / MANIFEST} names golden outputs of kind {about.get('kind', LAWS)!r} and dtype "
            f"{about['dtype']!r}; known: {', '.join(KINDS)}, in {', '.join(FLOOR)}; export it again"
        )
    try:
        noise = from_file(_Noise, {"noise": about.get("noise")}).noise
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST} has a wrong golden.{error}; export it again") from None
    return kind.from_tensors(read_tensors(folder / GOLDEN, manifest["files"]), about["dtype"], noise)


def refuse_missing_keys(config: Mapping[str, Any], known: type, folder: Path) -> None:
    """Refuse a configuration that lacks a key: it would take today's default, whatever was trained with.

    Raises:
        ArtifactError: which key.
    """
    if missing := [one.name for one in fields(known) if one.name not in config]:
        raise ArtifactError(f"{folder / MANIFEST} lacks config.{missing[0]}; export it again")


def check_copies(folder: Path, checksums: dict[str, str]) -> None:
    """Files in formats of other tools need not be there; where they are, they are what was exported."""
    for name, checksum in checksums.items():
        if "/" not in name or not (path := folder / name).is_file():
            continue
        if hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
            raise ArtifactError(
                f"{path} is not what {MANIFEST} was written for (sha256 differs); copy or export it again"
            )


def compare_names(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Refuse tensors that are not a module's.

    Raises:
        ArtifactError: names or shapes differ.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"unexpected {name} {shape}" for name, shape in found.items() if name not in expected]
    problems += [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ArtifactError(f"{path} does not hold the module's tensors: {'; '.join(problems[:8])}{more}")


def refuse_not_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that are no numbers.

    Raises:
        ArtifactError: a tensor holds NaN or an infinity.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        whole = tensor.float() if tensor.element_size() == 1 else tensor  # FP8 has no isfinite
        if wrong := int((~torch.isfinite(whole)).sum()):
            raise ArtifactError(
                f"{where}: {wrong} of {tensor.numel()} values of {name} are NaN or infinite; "
                "export it again from a checkpoint whose weights are numbers"
            )
