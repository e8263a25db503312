"""Reads an artifact's files, checking each before use, and builds the files to write."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import longtrain
from longtrain import methods
from longtrain.artifact.card import is_path, model_card
from longtrain.artifact.evidence import Evidence
from longtrain.artifact.golden import KINDS, Golden
from longtrain.artifact.golden.checks import Verification
from longtrain.artifact.golden.outputs import FILE as GOLDEN
from longtrain.assets import LOCAL, MANIFEST
from longtrain.errors import ArtifactError
from longtrain.files import impossible_number, read_bytes, read_json, read_sealed, sealed
from longtrain.former_names import STARTS
from longtrain.methods.written_folders import changed_files, checksums
from longtrain.provenance import without_folders
from longtrain.settings import from_file

if TYPE_CHECKING:
    from longtrain.artifact.folder import Artifact

SCHEMA = 2
MODEL, CARD = "model.safetensors", "README.md"
LAWS = "laws"


@dataclass(frozen=True)
class _Stage:
    """Keys of a data stage that are checked when a manifest is read."""

    doc_tokens: int | None = None


@dataclass(frozen=True)
class _Data:
    """Keys of the training data that are checked when a manifest is read."""

    sources: list[dict[str, Any]] | None = None
    stages: list[_Stage] | None = None


@dataclass(frozen=True)
class _Provenance:
    """Keys of a module's provenance that are checked; others may hold anything."""

    argv: list[str] | None = None
    git: dict[str, Any] | None = None
    data: _Data | None = None
    unchecked: list[str] | None = None


@dataclass(frozen=True)
class _GoldenFacts:
    """The manifest's entry on golden outputs (`Golden.facts`)."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    noise: dict[str, float]
    kind: Literal["laws", "scores", "rows"] = "laws"


@dataclass(frozen=True)
class _ArtifactManifest:
    """Keys of a manifest that are checked."""

    method: str
    config: dict[str, Any]
    target: dict[str, Any]
    files: dict[str, str]
    provenance: _Provenance
    verification: Verification
    golden: _GoldenFacts | None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read an artifact's manifest, and check the types of its values.

    Raises:
        ArtifactError: it cannot be read, was changed, has another schema version, or misses a key.
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
    try:
        from_file(_ArtifactManifest, manifest)
    except ValueError as error:
        raise ArtifactError(f"{path} has a wrong {error}; export it again") from None
    for key in ("config", "target"):
        if absurd := impossible_number(manifest[key], key):
            raise ArtifactError(f"{path} has {absurd}; export it again")
    return manifest


def local_target(folder: Path) -> str | None:
    """Return the folder or GGUF file that the target was loaded from, if it still exists."""
    try:
        where = read_sealed(folder / LOCAL)["target"]
        return where if Path(where).exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_tensors(path: Path, checksums: dict[str, str]) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        ArtifactError: the file is missing or damaged, or its checksum is not the manifest's.
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
    """Read the golden outputs; None if the manifest names none.

    Raises:
        ArtifactError: they are damaged.
    """
    about = manifest["golden"]
    if about is None:
        return None
    tensors = read_tensors(folder / GOLDEN, manifest["files"])
    return Golden.from_tensors(KINDS[about.get("kind", LAWS)], tensors, about["dtype"], about["noise"])


def refuse_missing_keys(config: Mapping[str, Any], known: type, folder: Path) -> None:
    """Refuse a configuration with a missing key, whose current default may differ from the trained value.

    Settings of how a training begins may be missing (`errors.STARTS`).

    Raises:
        ArtifactError: a key is missing.
    """
    missing = [one.name for one in dataclasses.fields(known) if one.name not in config]
    if missing := [name for name in missing if not name.startswith(STARTS)]:
        raise ArtifactError(f"{folder / MANIFEST} lacks config.{missing[0]}; export it again")


def check_copies(folder: Path, sums: Mapping[str, str]) -> None:
    """Check that existing files in other tools' formats are unchanged; missing ones are accepted.

    Raises:
        ArtifactError: a file differs from its checksum.
    """
    copies = {name: one for name, one in sums.items() if "/" in name and (folder / name).is_file()}
    if wrong := changed_files(folder, copies):
        raise ArtifactError(f"{folder}: {wrong[0]}; copy or export it again")


def check_tensors(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load tensors into a module; refuse other names or shapes than its own.

    Raises:
        ArtifactError: names or shapes differ.
    """
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        said = shorten(str(error), 600, placeholder=" ...")
        raise ArtifactError(f"{path} does not hold the module's tensors: {said}; export it again") from None


def refuse_not_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that are not finite.

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


def files_of(artifact: Artifact, name: str) -> dict[str, bytes]:
    """Return all files of an artifact, relative path -> content.

    Args:
        artifact: the artifact.
        name: name of its folder, for the card.
    """
    files = {MODEL: save_tensors(artifact.tensors, metadata={"format": "pt"})}
    golden = artifact.golden
    if golden is not None:
        files[GOLDEN] = save_tensors(golden.tensors())
    shown, spec = _without_folders(artifact), methods.get(artifact.method)
    if spec.files is not None:
        files |= spec.files(artifact.tensors, artifact.typed_config(), shown.target)
    manifest = {
        "schema": SCHEMA,
        "longtrain": longtrain.__version__,
        "method": artifact.method,
        "config": artifact.config,
        "target": shown.target.to_json(),
        "golden": None if golden is None else golden.facts(),
        "verification": dataclasses.asdict(artifact.verification),
        "files": checksums(files),
        "provenance": shown.provenance,
    }
    files[MANIFEST] = sealed(manifest)
    files[CARD] = card_of(artifact, name, files, (), Evidence())
    if is_path(artifact.target.name):
        files[LOCAL] = sealed({"target": str(Path(artifact.target.name).expanduser().absolute())})
    return files


def card_of(
    artifact: Artifact,
    name: str,
    files: Iterable[str],
    pictures: Iterable[str],
    evidence: Evidence,
    *,
    address: str | None = None,
) -> bytes:
    """Return the model card; see `model_card`.

    Args:
        artifact: the artifact.
        name: its name, for the title.
        files: relative paths of its files.
        pictures: names of PNG files.
        evidence: see `model_card`.
        address: see `model_card`.
    """
    card = model_card(
        _without_folders(artifact),
        methods.get(artifact.method),
        name=name,
        role=artifact.golden.kind.name if artifact.golden else LAWS,
        address=address,
        pictures=sorted(pictures),
        evidence=evidence,
        copies={path.partition("/")[0] for path in files if "/" in path},
    )
    return card.encode()


def _without_folders(artifact: Artifact) -> Artifact:
    """Return a copy of the artifact for publication, with paths cut to their last part."""
    name = artifact.target.name
    name = Path(name).expanduser().absolute().name if is_path(name) else name
    target = dataclasses.replace(artifact.target, name=name)
    return dataclasses.replace(artifact, target=target, provenance=without_folders(artifact.provenance))
