"""Writes a safetensors file one tensor at a time, so that only one tensor is in memory for it.

safetensors' own writer needs all tensors at once. The format is a length, a JSON header and the bytes:
https://github.com/huggingface/safetensors#format. Files are read with safetensors itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longtrain.files import need_regular, open_regular

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the format."""


@dataclass(frozen=True)
class Piece:
    """A tensor that is materialised only when it is written.

    Args:
        name: its key in the file.
        shape: known in advance.
        dtype: known in advance.
        read: returns the tensor, on any device; if it is distributed over ranks, every rank calls this.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Wrap existing tensors as pieces."""
    return [
        Piece(name, tuple(value.shape), value.dtype, lambda value=value: value)  # type: ignore[misc]
        for name, value in tensors.items()
    ]


def write(path: Path, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Write pieces into a new file and flush it to disk; every piece is read, even after an error.

    Returns:
        `bytes` and `sha256` of the file.

    Raises:
        OSError: the disk is full or not writable; all pieces have been read, as other ranks expect.
    """
    ordered = _aligned(pieces)
    reading = iter(ordered)
    try:
        with path.open("wb") as file:
            digest, size = hashlib.sha256(), 0
            for part in _parts(ordered, reading):
                file.write(part)
                digest.update(part)
                size += len(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        take_part(reading)
        raise
    return {"bytes": size, "sha256": digest.hexdigest()}


def take_part(pieces: Iterable[Piece]) -> None:
    """Read pieces and discard them, as a rank does while another one writes them."""
    for piece in pieces:
        piece.read()


def read_others(pieces: Sequence[Piece]) -> None:
    """Take part in `write` of the same pieces on another rank, in its order."""
    take_part(_aligned(pieces))


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Tensors(Mapping[str, Tensor]):
    """The tensors of a file by name, each read from disk on access, on the CPU.

    Args:
        path: a safetensors file whose checksum was verified.
    """

    def __init__(self, path: Path) -> None:
        need_regular(path)
        self._file = safe_open(path, framework="pt", device="cpu")
        self._names = dict.fromkeys(sorted(self._file.keys()))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _aligned(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort by item size, descending, so that every tensor begins at a multiple of its item size."""
    return sorted(pieces, key=lambda piece: -piece.dtype.itemsize)


def _parts(pieces: Sequence[Piece], reading: Iterator[Piece]) -> Iterator[bytes | memoryview]:
    header, end = {}, 0
    for piece in pieces:
        begin, end = end, end + piece.bytes
        header[piece.name] = {
            "dtype": NAMES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in reading:
        tensor = piece.read().detach().to("cpu", piece.dtype).contiguous()
        assert tuple(tensor.shape) == piece.shape, piece.name
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data
