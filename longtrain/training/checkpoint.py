"""Checkpoints on disk: written whole or not at all, checked before use, the one before always kept.

A run's folder holds `last.ckpt` and `previous.ckpt`; a new one is written as `incoming.ckpt` and then
renamed, so a kill at any moment leaves at least one that is whole. A checkpoint is torch's zip file (a folder
under DeepSpeed), whose records carry a CRC that is verified before anything is loaded from it.

The generations are kept by hand, since `longtrain.files` takes whole contents, and a checkpoint is streamed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from longtrain.errors import ArtifactError, ConfigError, TrainingError
from longtrain.log import get_logger

log = get_logger(__name__)

LAST, PREVIOUS, INCOMING = "last.ckpt", "previous.ckpt", "incoming.ckpt"
FACTS = "longtrain.json"
"""The file of a DeepSpeed folder that holds the step and the facts; other checkpoints hold them inside."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself: optimizer steps done and the facts of its run."""

    path: Path
    step: int
    facts: dict[str, Any]


class _Sink:
    """A file for `torch.save` that remembers an error instead of raising it inside torch's writer."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered here."""


class AtomicIO(CheckpointIO):
    """Lightning's way to the disk. A failed write is kept in `error`: every rank can stop together."""

    def __init__(self) -> None:
        self.error: str | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write to a temporary name, sync, rename. On an error nothing is left, and `error` says why."""
        path, self.error = Path(path), None
        temporary = path.with_name(f".{path.name}.tmp")
        written = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                sink = _Sink(file)
                torch.save(checkpoint, sink)  # type: ignore[arg-type]
                written = sink.bytes
                if sink.error is not None:
                    raise sink.error
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except OSError as error:
            self.error = f"{error.strerror or error} (it needs {written / 2**20:.1f} MiB{_free(path.parent)})"
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors and plain values only: no code in a checkpoint is ever run."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint."""
        remove(Path(path))


def save(trainer: Any, folder: Path) -> Path:
    """Save the run as `last.ckpt` of a folder and keep the one before; every rank calls this.

    Raises:
        TrainingError: the disk is full or cannot be written; the checkpoints before are as they were.
    """
    incoming = folder / INCOMING
    try:
        if trainer.is_global_zero:
            remove(incoming)
        trainer.save_checkpoint(incoming)
        failed = getattr(trainer.strategy.checkpoint_io, "error", None)
    except OSError as error:  # DeepSpeed writes by itself
        failed = error.strerror or str(error)
    failed = trainer.strategy.broadcast(failed)
    if failed is None and trainer.is_global_zero:
        failed = _rotate(folder, trainer.lightning_module.facts, trainer.global_step)
    failed = trainer.strategy.broadcast(failed)
    if failed is not None:
        if trainer.is_global_zero:
            remove(incoming)
        raise TrainingError(
            f"cannot save a checkpoint at step {trainer.global_step} in {folder}: {failed}; "
            f"{describe(folder)}; make room or set home=FOLDER, then run the same command again to resume"
        )
    return folder / LAST


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint to start from.

    Args:
        folder: the run's checkpoints.
        resume: `auto` (the last one if there is one), `never`, or a path.

    Raises:
        ConfigError: the path does not exist.
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
    verify(candidates[0])  # killed between two renames, a run has no last.ckpt but the one before
    return candidates[0]


def verify(path: Path) -> None:
    """Check that a checkpoint is whole, byte by byte.

    Raises:
        ArtifactError: it is damaged; the message names the good one beside it.
    """
    if (reason := _damage(path)) is None:
        return
    other = path.with_name(PREVIOUS if path.name != PREVIOUS else LAST)
    if other.exists() and _damage(other) is None:
        advice = f"the last good one is {other}: pass resume={other}, or resume=never to start anew"
    else:
        advice = "there is no other one beside it; pass resume=never to start anew"
    raise ArtifactError(f"checkpoint {path} is damaged ({reason}); {advice}")


def read(path: Path) -> Saved:
    """Step and facts of a checkpoint.

    Raises:
        ArtifactError: the file is not a checkpoint of longtrain.
    """
    try:
        if path.is_dir():
            about = json.loads((path / FACTS).read_text())
        else:
            about = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["longtrain"]
        return Saved(path, int(about["step"]), dict(about["facts"]))
    except (KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is not a training checkpoint of longtrain ({type(error).__name__}: {error}); "
            f"to start from the weights of an artifact use init=ARTIFACT"
        ) from error


def trained_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The trained module's tensors in a checkpoint file, under the module's own names, on the CPU.

    Raises:
        ArtifactError: damaged, or not a checkpoint of longtrain.
    """
    verify(path)
    read(path)
    if path.is_dir():
        from longtrain.training.strategy import full_state

        state = full_state(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    prefix = "objective.module."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def check_facts(saved: Saved, facts: Mapping[str, Any]) -> None:
    """Refuse to resume a run whose settings changed in a way that matters.

    Raises:
        ConfigError: lists the keys that differ.
    """
    if changed := differences(saved.facts, facts):
        raise ConfigError(
            f"cannot resume from {saved.path} (step {saved.step}): the settings changed ({changed}); "
            f"put them back, choose another name=NAME, or pass resume=never to start anew"
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys, as facts are kept."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs, as `key: old -> new` on one line; empty where nothing does."""
    keys = [key for key in sorted({*old, *new}) if _plain(old.get(key)) != _plain(new.get(key))]
    shown = ", ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys[:12])
    return shown + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")


def describe(folder: Path) -> str:
    """One phrase on the newest whole checkpoint of a folder, for error messages."""
    for name in (LAST, PREVIOUS):
        path = folder / name
        if path.exists() and _damage(path) is None:
            return f"last good checkpoint: {path} (step {read(path).step})"
    return "no checkpoint was saved before"


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rotate(folder: Path, facts: Mapping[str, Any], step: int) -> str | None:
    """Incoming -> last -> previous; returns what went wrong."""
    incoming, last, previous = (folder / name for name in (INCOMING, LAST, PREVIOUS))
    try:
        if incoming.is_dir():
            (incoming / FACTS).write_text(json.dumps({"step": step, "facts": facts}))
        if last.exists():
            if previous.is_dir() or last.is_dir():
                remove(previous)
            last.replace(previous)
        incoming.replace(last)
        sync_folder(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _damage(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    if path.is_dir():
        return None if (path / FACTS).is_file() else "the folder is incomplete"
    try:
        with zipfile.ZipFile(path) as file:
            if (bad := file.testzip()) is not None:
                return f"its record {bad} does not match its checksum"
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, OSError, EOFError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0].split(". ")[0].lower() or type(error).__name__
        return f"{reason}, {path.stat().st_size} bytes"
    return None


def _free(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free / 2**20:.1f} MiB are free"
    except OSError:
        return ""


def _plain(value: Any) -> Any:
    """Tuples and lists compare equal, as do numbers that JSON does not tell apart."""
    return json.loads(json.dumps(value, default=str))
