"""Finds the weight files of a target folder, and reads tensors from them as they were written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longtrain.errors import ArtifactError
from longtrain.files import read_json
from longtrain.pickled import read_pickled_tensors

INT8_FILE = "weights.int8.safetensors"
"""File of int8 matrices with one scale a row (`name` and `name.scale`); the weight is their bf16 product."""


def weight_files(folder: Path, *, some: bool = False) -> list[Path]:
    """Return the files that contain the weights, shards in order.

    Args:
        folder: the target's folder.
        some: True if files that an index names may be missing.

    Raises:
        ArtifactError: there are none, or an index names a file that is not there.
    """
    for name in ("model.safetensors", INT8_FILE, "model.safetensors.index.json", "pytorch_model.bin",
                 "pytorch_model.bin.index.json"):  # fmt: skip
        file = folder / name
        if not file.is_file():
            continue
        if not name.endswith(".index.json"):
            return [file]
        try:
            shards = sorted(set(read_json(file)["weight_map"].values()))
            if not shards or not all(isinstance(one, str) and Path(one).name == one for one in shards):
                raise ValueError("weight_map must give file names of this folder")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ArtifactError(f"{file} is not a weight index ({error}); get the folder again") from error
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent and not some:
            raise ArtifactError(f"{folder} lacks {absent[0]}, which {name} names; get the folder again")
        return [folder / shard for shard in shards if shard not in absent]
    raise ArtifactError(
        f"{folder} has no weights; expected model.safetensors (or shards with an index), or {INT8_FILE}"
    )


class StoredTensors:
    """The tensors of a folder's weight files by name, each read on request.

    Args:
        folder: the target's folder.
        device: device that safetensors are read to; those of a `.bin` file are read to the CPU.
        some: True if files that an index names may be missing.

    Raises:
        ArtifactError: a file is missing, truncated or unreadable.
    """

    def __init__(self, folder: Path, device: torch.device, *, some: bool = False) -> None:
        self.device = device
        self.file_of: dict[str, Path] = {}
        """Tensor name -> its file, in the order of the files."""
        self._stores: dict[Path, Any] = {}
        for file in weight_files(folder, some=some):
            self.file_of |= dict.fromkeys(self._open(file).keys(), file)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor without reading it."""
        file = self.file_of[name]
        store = self._open(file)
        return tuple(store[name].shape if file.suffix == ".bin" else store.get_slice(name).get_shape())

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return a range of a tensor along dim 0, in the dtype that it was stored in.

        Raises:
            ArtifactError: the file is damaged.
        """
        file = self.file_of[name]
        store = self._open(file)
        try:
            if file.suffix == ".bin":
                return store[name][rows]
            return store.get_tensor(name) if rows == slice(None) else store.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error

    def _open(self, file: Path) -> Any:
        """Return the open file; at most two `.bin` files are kept open, since some are read whole."""
        if file not in self._stores:
            if file.suffix == ".bin":
                for old in list(self._stores)[:-1]:
                    del self._stores[old]
                self._stores[file] = _unpickled(file)
            else:
                try:
                    self._stores[file] = safe_open(file, framework="pt", device=str(self.device))
                except (SafetensorError, OSError) as error:
                    raise _damaged(file, error) from error
        return self._stores[file]


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a `torch.save` file, in either of its formats; other objects are refused."""
    try:
        return read_pickled_tensors(file, mmap=True)
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ArtifactError:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return ArtifactError(f"{file} is damaged or truncated ({first_line}); get the folder again")
