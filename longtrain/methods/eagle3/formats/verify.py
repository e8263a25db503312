"""Checks a folder of either format against its own record, and any folder against what engines need.

Engines check little: a missing tensor, another rotary base or a wrong vocabulary map lowers acceptance
without a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.errors import ArtifactError, LongtrainError, TargetMismatchError, first_line
from longtrain.files import read_json
from longtrain.methods.eagle3.formats.golden import FOLDER, GOLDEN, RECORD, Proposals
from longtrain.methods.eagle3.formats.names import (
    CONFIG,
    EMBEDDINGS,
    FLAT,
    IDS,
    MODEL,
    format_of,
    inside,
    read_config,
    read_tensors,
)
from longtrain.methods.eagle3.formats.read import read_folder
from longtrain.methods.eagle3.formats.sglang import sglang_problems
from longtrain.methods.eagle3.formats.smoke import smoke
from longtrain.methods.eagle3.vocabulary import lacking
from longtrain.methods.written_folders import changed_files

if TYPE_CHECKING:
    from longtrain.methods.spec import Imported
    from longtrain.targets.model import Target

Json = dict[str, Any]

FREE = ("speculators_config", "dtype", "torch_dtype", "transformers_version")
"""Keys of `config.json` that may be edited after the export."""
LARGEST = 1e4
"""Largest plausible magnitude of a draft's trained weight."""


def read_record(folder: Path) -> Json | None:
    """Read the record of a folder's files; None if another tool wrote the folder.

    Raises:
        ArtifactError: longtrain wrote the folder, and its record is missing or damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        if (folder / FOLDER).is_dir() or read_config(folder).get("trained_by") == "longtrain":
            raise ArtifactError(f"{path} is missing; copy the whole folder, or export it again")
        return None
    try:
        record = read_json(path)
        kinds = {"config": dict, "files": dict, "fresh": list}
        if not all(isinstance(record[key], kind) for key, kind in kinds.items()):
            raise ValueError("a key is of another kind")
        if lost := [name for name in (CONFIG, MODEL, GOLDEN) if name not in record["files"]]:
            raise ValueError(f"files has no checksum of {', '.join(lost)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the folder again") from None
    return record


def changed_keys(then: Json, now: Json, before: str = "") -> list[str]:
    """Return a message for each key of `config.json` that was added, removed or changed since the export."""
    wrong = []
    for key in dict.fromkeys([*then, *now]):
        path = before + key
        if path in FREE or (key not in then and then.get(key) == now.get(key)):
            continue
        if key not in now:
            wrong.append(f"{CONFIG} lacks {path} (exported: {json.dumps(then[key])})")
        elif isinstance(then.get(key), dict) and isinstance(now[key], dict):
            wrong += changed_keys(then[key], now[key], f"{path}.")
        elif key not in then or then[key] != now[key]:
            wrong.append(
                f"{CONFIG} has {path}={json.dumps(now[key])} (exported: {json.dumps(then.get(key))})"
            )
    return wrong


def changes(folder: Path, record: Json) -> list[str]:
    """Return a message for each file and key of a folder that differs from the export."""
    others = {name: checksum for name, checksum in record["files"].items() if name != CONFIG}
    return changed_files(folder, others) + changed_keys(record["config"], read_config(folder))


def refuse_changed(folder: Path) -> None:
    """Refuse a folder that longtrain wrote and that was changed since.

    Raises:
        ArtifactError: files or keys differ; the message lists all of them.
    """
    record = read_record(folder)
    if record is not None and (wrong := changes(folder, record)):
        raise ArtifactError(f"{folder}: {'; '.join(wrong)}; export it again, or copy it whole")


def verify_folder(folder: Path, target: Target | None, trained_by: str | None) -> list[str]:
    """Compare a folder with its record, if it has one, and with what engines need.

    Args:
        folder: a folder of either format.
        target: the frozen target, to check shapes and to test the draft on text; None: skip these checks.
        trained_by: see `read_folder`.

    Returns:
        A line for each comparison.

    Raises:
        ArtifactError: a check failed; the message lists all failures in one line.
    """
    if format_of(folder) is None:
        raise ArtifactError(f"{folder} holds no EAGLE-3 draft: no {CONFIG} that says so; allowed: its folder")
    wrong, said = [], []
    record = read_record(folder)
    if record is not None:
        wrong += changes(folder, record)
        said.append(f"files={len(record['files'])} config.json={'changed' if wrong else 'as exported'}")
    try:
        found = read_folder(folder, trained_by)
    except LongtrainError as error:
        raise ArtifactError("; ".join([str(error), *wrong])) from None
    wrong += unhealthy(found.tensors)
    embed_VE, misshapen = _embeddings(folder, found)
    wrong += misshapen
    fresh = fresh_norms(found.tensors)
    said.append(f"tensors={len(found.tensors)} format={found.about['format']}")
    if record is not None:
        wrong += [
            f"{name} is as fresh (all ones) and was trained" for name in fresh if name not in record["fresh"]
        ]
        wrong += _replay(folder, found, embed_VE)
        said.append("golden proposals replayed")
    elif fresh:
        said.append(f"norms that are all ones: {', '.join(fresh)} (perhaps not trained)")
    if found.about["format"] == FLAT:
        wrong += sglang_problems(read_config(folder), _weight_names(folder))
        said.append("SGLang's rules of loading hold")
    if target is not None:
        try:
            wrong += _with_target(found, target, embed_VE, said)
        except TargetMismatchError as error:
            wrong.append(str(error))
    if wrong:
        raise ArtifactError(f"{folder}: {'; '.join(wrong)}")
    return said


def fresh_norms(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the norms whose weights are exactly their initial values."""
    return [
        name for name, part in tensors.items() if part.ndim == 1 and name != IDS and bool((part == 1).all())
    ]


def unhealthy(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return messages on tensors that cannot be the result of training (constant, not finite, too large)."""
    wrong = []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        wide = tensor.float()
        if not bool(torch.isfinite(wide).all()):
            wrong.append(f"{name} holds numbers that are not finite")
        elif float(wide.abs().max()) > LARGEST:
            wrong.append(f"{name} reaches {float(wide.abs().max()):.3g} (allowed {LARGEST:g})")
        elif wide.ndim == 2 and float(wide.std()) == 0:
            wrong.append(f"{name} holds one number everywhere")
    return wrong


def _embeddings(folder: Path, found: Imported) -> tuple[Tensor | None, list[str]]:
    """Return the folder's embeddings [V, E], if they are valid, and messages on what is wrong with them."""
    named = {inside(name): tensor for name, tensor in read_tensors(folder).items()}
    embed_VE, shape = named.get(EMBEDDINGS), (found.target.vocab_size, found.target.hidden_size)
    if embed_VE is None:
        if found.about["format"] == FLAT:
            return None, []
        return None, [f"{EMBEDDINGS} is missing, and a speculators folder must hold it"]
    if tuple(embed_VE.shape) != shape or not embed_VE.is_floating_point():
        return None, [f"{EMBEDDINGS} is {embed_VE.dtype} {tuple(embed_VE.shape)}; allowed: floats {shape}"]
    return embed_VE, []


def _replay(folder: Path, found: Imported, embed_VE: Tensor | None) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from longtrain.methods.eagle3.config import Config

    try:
        golden = Proposals.from_tensors(load_file(folder / GOLDEN))
    except ArtifactError as error:
        return [str(error)]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        return [f"{GOLDEN} cannot be read: {error}"]
    try:
        wrong = golden.replay(found.tensors, Config(**found.config), found.target)
        if found.about["format"] == FLAT or embed_VE is None:
            return wrong
        same = torch.equal(embed_VE[golden.ids_T].float(), golden.first_TE)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return [f"{GOLDEN} cannot be replayed: {first_line(error)}"]
    return wrong if same else [*wrong, "embed_tokens.weight has other rows than were exported"]


def _weight_names(folder: Path) -> list[str]:
    return [name for name in read_tensors(folder) if inside(name) != EMBEDDINGS]


def _with_target(found: Imported, target: Target, embed_VE: Tensor | None, said: list[str]) -> list[str]:
    """Check shapes, vocabulary and embeddings against a target, and the draft's agreement with it on text."""
    found.target.check(target.info)
    missing = lacking(found.tensors[IDS], target.info)
    wrong = [missing] if missing else []
    mine_VE = target.model.model.embed_tokens.weight
    if embed_VE is not None and not found.config["own_embeddings"]:
        mine_VE = mine_VE.detach().cpu().float()
        if not torch.allclose(embed_VE.float(), mine_VE, rtol=1e-2, atol=1e-3):
            wrong.append(
                "embed_tokens.weight is no copy of the target's, and the folder says that it was not trained"
            )
    lines, problems = smoke(found, target)
    said += lines
    return wrong + problems
