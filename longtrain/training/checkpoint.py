"""Checkpoints on disk: one format for every strategy, written whole or not at all, checked before use.

A run's folder contains `last.ckpt` and `previous.ckpt`; a new one is written as `incoming.ckpt` and then
renamed, so a kill at any moment leaves at least one that is whole. A last checkpoint that was damaged since
never replaces the previous one. Each is a folder:

    longtrain.json           step, facts, what was seen, the number of ranks, size and SHA-256 of every file
    weights.safetensors      the trained tensors by the name they have in the trained module
    optimizer.safetensors    the optimiser's state, `PARAMETER.exp_avg` for example
    state.safetensors        tensors of the rest: the random states of all ranks, callbacks

Nothing in it is pickled, and nothing depends on how the run was distributed, so that a run can continue with
another strategy and on another number of ranks. `state.py` gathers and restores the content.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from longtrain.errors import ArtifactError, ConfigError, TrainingError
from longtrain.files import free_bytes, json_sha256, read_json
from longtrain.log import get_logger
from longtrain.training import tensor_file
from longtrain.training.tensor_file import Piece, Tensors

log = get_logger(__name__)

LAST, PREVIOUS, INCOMING = "last.ckpt", "previous.ckpt", "incoming.ckpt"
ABOUT = "longtrain.json"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.safetensors"
FORM = 1
"""Version of the format; other versions are refused."""

_CHECKSUM = "sha256"
"""The key of `longtrain.json` with the checksum of all other keys."""


@dataclass(frozen=True)
class Saved:
    """Step and facts of a checkpoint.

    Args:
        path: its folder.
        step: optimiser steps done.
        facts: settings that the run that resumes from it must share.
        about: all of `longtrain.json`.
    """

    path: Path
    step: int
    facts: dict[str, Any]
    about: dict[str, Any] = field(repr=False)

    def tensors(self, name: str) -> Tensors:
        """Open the tensors of one of its files."""
        return Tensors(self.path / name)


def write(
    folder: Path, about: Mapping[str, Any], pieces: Mapping[str, Sequence[Piece]], *, writer: bool
) -> str | None:
    """Write a checkpoint as `last.ckpt` of a folder and keep the one before.

    Every rank calls this, since tensors may be gathered while they are written; one of them writes.

    Args:
        folder: folder of the checkpoints.
        about: `step`, `facts` and more, as JSON values.
        pieces: file name -> its tensors.
        writer: True if this rank writes.

    Returns:
        The reason, in a phrase, if it could not be written (earlier checkpoints are then unchanged), else
            None.
    """
    if not writer:
        for some in pieces.values():
            tensor_file.read_others(some)
        return None
    incoming, files, failed = folder / INCOMING, {}, None
    try:
        remove(incoming)
        incoming.mkdir(parents=True)
    except OSError as error:
        failed = error
    # Tensors may be gathered from all ranks: after an error the rest are still read, or the others would
    # hang.
    for name, some in pieces.items():
        if failed is not None:
            tensor_file.read_others(some)
            continue
        try:
            files[name] = tensor_file.write(incoming / name, some)
        except OSError as error:
            failed = error
    try:
        if failed is not None:
            raise failed
        _write_about(incoming, {"form": FORM, **about, "files": files})
        _rotate(folder)
    except OSError as error:
        needed = sum(piece.bytes for some in pieces.values() for piece in some)
        shutil.rmtree(incoming, ignore_errors=True)
        return f"{error.strerror or error} (it needs {needed / 2**20:.1f} MiB{_free(folder)})"
    return None


def cannot_save(folder: Path, step: int, reason: str) -> TrainingError:
    """Build the error for a checkpoint that could not be written."""
    return TrainingError(
        f"cannot save a checkpoint at step {step} in {folder}: {reason}; "
        f"{describe(folder)}; make room or set home=FOLDER, then run the same command again to resume"
    )


def find(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint to start from, verified.

    Args:
        folder: the run's checkpoints.
        resume: `auto` (the last one if there is one), `never`, or a path.

    Raises:
        ConfigError: the path does not exist, or is the folder of a run's checkpoints.
        ArtifactError: the checkpoint is damaged.
    """
    if resume == "never":
        return None
    if resume != "auto":
        if not Path(resume).exists():
            raise ConfigError(
                f"no checkpoint at resume={resume}; allowed: auto, never or the path of a checkpoint"
            )
        verify(Path(resume))
        return Path(resume)
    candidates = [folder / name for name in (LAST, PREVIOUS) if (folder / name).exists()]
    if not candidates:
        return None
    verify(candidates[0])  # a kill between two renames leaves only previous.ckpt
    return candidates[0]


def verify(path: Path) -> None:
    """Verify a checkpoint, byte by byte.

    Raises:
        ArtifactError: it is damaged, or of another format; the message names the good one beside it.
        ConfigError: it is the folder of a run's checkpoints.
    """
    if path.is_file():
        raise _stranger(path, "it is a file, perhaps of an earlier longtrain, and a checkpoint is a folder")
    if (reason := _damage(path)) is None:
        return
    if (path / LAST).is_dir():
        raise ConfigError(f"resume={path} is a folder of checkpoints; pass resume={path / LAST}")
    other = path.with_name(PREVIOUS if path.name != PREVIOUS else LAST)
    if other.exists() and _damage(other) is None:
        advice = f"the last good one is {other}: pass resume={other}, or resume=never to start anew"
    else:
        advice = "there is no good one beside it; pass resume=never to start anew"
    raise ArtifactError(f"checkpoint {path} is damaged ({reason}); {advice}")


def read(path: Path) -> Saved:
    """Read step and facts of a checkpoint.

    Raises:
        ArtifactError: it is not a checkpoint of longtrain, or `longtrain.json` is damaged.
    """
    try:
        about = _read_about(path)
        return Saved(path, int(about["step"]), dict(about["facts"]), about)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise _stranger(path, f"{type(error).__name__}: {error}") from error


def trained_tensors(path: Path) -> dict[str, Tensor]:
    """Return the trained module's tensors in a checkpoint, under the module's own names, on the CPU.

    Raises:
        ArtifactError: damaged, or not a checkpoint of longtrain.
    """
    verify(path)
    return dict(read(path).tensors(WEIGHTS))


def check_facts(saved: Saved, facts: Mapping[str, Any]) -> None:
    """Refuse to resume a run with changed settings.

    Raises:
        ConfigError: lists the keys that differ.
    """
    if changed := differences(saved.facts, facts):
        run = saved.path.absolute().parents[2].name  # NAME/train/checkpoints/FILE
        raise ConfigError(
            f"cannot resume from {saved.path} (step {saved.step}): the settings changed ({changed}); "
            "put them back, choose another name=NAME, pass resume=never to start anew, or begin with its "
            f"weights: longtrain export with the settings of before, then name=NAME init={run}"
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one with dotted keys, the form of facts."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe differences as `key: old -> new` on one line; empty if there are none."""
    keys = [key for key in sorted({*old, *new}) if _plain(old.get(key)) != _plain(new.get(key))]
    shown = ", ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys[:12])
    return shown + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")


def describe(folder: Path) -> str:
    """Describe the newest whole checkpoint of a folder, for error messages."""
    for name in (LAST, PREVIOUS):
        path = folder / name
        if path.exists() and _damage(path) is None:
            return f"last good checkpoint: {path} (step {read(path).step})"
    return "no checkpoint was saved before"


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder, if it exists; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that new names in it survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rotate(folder: Path) -> None:
    """Rename incoming to last and last to previous; a damaged last one is deleted, and previous stays."""
    incoming, last, previous = (folder / name for name in (INCOMING, LAST, PREVIOUS))
    if last.exists():
        if (reason := _damage(last)) is None:
            remove(previous)
            last.replace(previous)
        else:
            log.warning("damaged=%s reason=%r: it is replaced, and %s is kept", last, reason, previous.name)
            remove(last)
    incoming.replace(last)
    sync_folder(folder)


def _write_about(folder: Path, about: Mapping[str, Any]) -> None:
    values = json.loads(json.dumps(about, default=str))
    with (folder / ABOUT).open("w", encoding="utf-8") as file:
        json.dump({**values, _CHECKSUM: json_sha256(values)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _read_about(path: Path) -> dict[str, Any]:
    """Read `longtrain.json` and verify its own checksum."""
    try:
        about = read_json(path / ABOUT)
    except ValueError as error:
        raise ValueError(f"{ABOUT} is no JSON: {error}") from None
    if not isinstance(about, dict) or _CHECKSUM not in about:
        raise ValueError(f"{ABOUT} has no checksum")
    if about.pop(_CHECKSUM) != json_sha256(about):
        raise ValueError(f"{ABOUT} does not match its checksum")
    if about.get("form") != FORM:
        raise ValueError(f"its form is {about.get('form')}, and this longtrain reads {FORM}")
    return about


def _damage(path: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None."""
    try:
        about = _read_about(path)
        for name, known in about["files"].items():
            size = (path / name).stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size} bytes of {known['bytes']}"
            if tensor_file.sha256(path / name) != known["sha256"]:
                return f"{name} does not match its checksum"
            Tensors(path / name)
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else path.name}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        return str(error)
    return None


def _stranger(path: Path, reason: str) -> ArtifactError:
    return ArtifactError(
        f"{path} is not a training checkpoint of this longtrain ({reason}); pass resume=never to start anew, "
        "or start from the weights of an artifact with init=ARTIFACT"
    )


def _free(folder: Path) -> str:
    try:
        return f", {free_bytes(folder) / 2**20:.1f} MiB are free"
    except OSError:
        return ""


def _plain(value: Any) -> Any:
    """Normalise through JSON, so that tuples equal lists and equal numbers compare equal."""
    return json.loads(json.dumps(value, default=str))
