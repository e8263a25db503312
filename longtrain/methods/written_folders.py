"""Records in folders that longtrain exported in other tools' formats, by which changes are detected."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from longtrain.errors import ArtifactError, ConfigError
from longtrain.files import open_regular, read_sealed, sealed
from longtrain.methods.spec import Imported
from longtrain.targets.info import TargetInfo, TargetSketch

Build = Callable[[Any, TargetSketch], tuple[Any, dict[str, Tensor]]]
"""(exported settings, target sketch) -> settings and tensors of the module in the folder."""


def record_of(config: Any, info: TargetInfo, facts: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """Return a folder's record: settings, target, training steps, and checksums of the exported files."""
    about = {"method": vars(config), "target": info.to_json(), "steps": facts.get("step")}
    return sealed({**about, "files": checksums(files)})


def read_written(
    folder: Path, form: str, trained_by: str | None, record: str, names: Sequence[str], build: Build
) -> Imported:
    """Read the module of a folder with such a record.

    Args:
        folder: the folder.
        form: name of its format.
        trained_by: a trainer named by the user; must be None, since only longtrain writes such folders.
        record: the record's path in the folder.
        names: files that must be unchanged.
        build: see `Build`; any exception it raises means that the folder is damaged.

    Raises:
        ConfigError: `trained_by` is given.
        ArtifactError: the folder is damaged, or was changed after the export.
    """
    if trained_by is not None:
        raise ConfigError(f"trained_by={trained_by}: {folder} was written by longtrain; leave trained_by out")
    try:
        values = read_sealed(folder / record)
        if wrong := changed_files(folder, {name: values["files"][name] for name in names}):
            raise ValueError(wrong[0])
        sketch = TargetSketch.from_json(values["target"])
        config, tensors = build(values["method"], sketch)
    except Exception as error:  # damaged files may raise anything in torch, safetensors or peft
        said = " ".join(str(error).split()) or type(error).__name__
        raise ArtifactError(f"{folder} cannot be read: {said}; export it again, or copy it whole") from None
    about = {"format": form, "trained_by": "longtrain", "folder": folder.name}
    return Imported(dict(vars(config)), tensors, sketch, about)


def checksums(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the hex sha256 of each file, by name."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def changed_files(folder: Path, sums: Mapping[str, str]) -> list[str]:
    """Return a message for each file that is missing or differs from its checksum."""
    wrong = []
    for name, checksum in sums.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
            continue
        with os.fdopen(open_regular(path), "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != checksum:
                wrong.append(f"{name} is not what was exported (sha256 differs)")
    return wrong


def shown_target(info: TargetInfo) -> str:
    """Return the target's name for a card; of a local path only the last part."""
    return Path(info.name).name if Path(info.name).is_dir() else info.name or "TARGET"
