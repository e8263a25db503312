"""The files of an artifact, made of what is in memory; nothing is written here."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as save_tensors

import longtrain
from longtrain import methods
from longtrain.artifact.card import is_path, model_card
from longtrain.artifact.evidence import Evidence
from longtrain.artifact.golden import Golden
from longtrain.artifact.stored import GOLDEN, KINDS, LAWS, SCHEMA
from longtrain.assets import LOCAL, MANIFEST
from longtrain.files import sealed
from longtrain.provenance import without_folders

if TYPE_CHECKING:
    from longtrain.artifact.folder import Artifact

MODEL, CARD = "model.safetensors", "README.md"


def files_of(artifact: Artifact, name: str) -> dict[str, bytes]:
    """All files of an artifact by their path in its folder.

    Args:
        artifact: in memory.
        name: the folder's, for the card.
    """
    files = {MODEL: save_tensors(artifact.tensors, metadata={"format": "pt"})}
    if artifact.golden is not None:
        files[GOLDEN] = save_tensors(artifact.golden.tensors())
    shown, spec = _without_folders(artifact), methods.get(artifact.method)
    if spec.files is not None:
        files |= spec.files(artifact.tensors, artifact.typed_config(), shown.target)
    manifest = {
        "schema": SCHEMA,
        "longtrain": longtrain.__version__,
        "method": artifact.method,
        "config": artifact.config,
        "target": shown.target.to_json(),
        "golden": _golden_facts(artifact.golden),
        "verification": dataclasses.asdict(artifact.verification),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
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
    """The model card; see `model_card`.

    Args:
        artifact: in memory.
        name: what it is called.
        files: their paths in the folder.
        pictures: names of PNG files.
        evidence: see `model_card`.
        address: see `model_card`.
    """
    card = model_card(
        _without_folders(artifact),
        methods.get(artifact.method),
        name=name,
        role=_kind(artifact.golden) or LAWS,
        address=address,
        pictures=sorted(pictures),
        evidence=evidence,
        copies={path.partition("/")[0] for path in files if "/" in path},
    )
    return card.encode()


def _golden_facts(golden: Golden | None) -> dict[str, Any] | None:
    if golden is None:
        return None
    kind = _kind(golden)
    return {"dtype": golden.dtype, "noise": golden.noise, **({} if kind == LAWS else {"kind": kind})}


def _kind(golden: Golden | None) -> str | None:
    """The manifest's name for a kind of golden outputs."""
    return next((name for name, kind in KINDS.items() if isinstance(golden, kind)), None)


def _without_folders(artifact: Artifact) -> Artifact:
    """The artifact as others may read it: of folders and paths only the last part is left."""
    name = artifact.target.name
    name = Path(name).expanduser().absolute().name if is_path(name) else name
    target = dataclasses.replace(artifact.target, name=name)
    return dataclasses.replace(artifact, target=target, provenance=without_folders(artifact.provenance))
