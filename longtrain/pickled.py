"""Reads files of `torch.save` without executing pickled code, and verifies their CRC checksums."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import first_line
from longtrain.files import need_regular

if TYPE_CHECKING:
    from torch import Tensor


def read_pickled(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of `torch.save` onto the CPU.

    Torch writes a zip archive with a CRC-32 for each part, but does not verify it when it loads; this
    function verifies all parts first. Files of before PyTorch 1.6 are not archives and have no CRC.

    Args:
        path: path of the file.
        mmap: memory-map the tensors, if the file is an archive.

    Raises:
        OSError: the file is missing, unreadable or not regular.
        ValueError: it is damaged, or holds objects other than containers, numbers, strings and tensors.
    """
    import torch

    need_regular(path)
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            _compare(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive and mmap)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) or "Weights only" in str(error):  # torch advises to run it
            raise ValueError("it holds more than tensors, and nothing in such a file is run") from None
        raise ValueError(first_line(error)) from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(first_line(error)) from None
    except Exception as error:  # a damaged file may raise anything in torch, pickle or zipfile
        raise ValueError(first_line(error)) from None


def read_pickled_tensors(path: Path, *, mmap: bool = False) -> dict[str, Tensor]:
    """Load a state dict, name -> tensor, from a file of `torch.save`; see `read_pickled`.

    Raises:
        OSError: see `read_pickled`.
        ValueError: see `read_pickled`; or a value is not a dense tensor.
    """
    import torch

    found = read_pickled(path, mmap=mmap)
    if not isinstance(found, Mapping):
        raise ValueError(f"it holds a {type(found).__name__}, and no tensors by name")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"it holds {name!r}, which is no tensor")
        if (
            value.layout != torch.strided
            or value.device.type != "cpu"
            or value.is_quantized
            or value.is_nested
        ):
            form = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise ValueError(f"tensor {name} is {form} on {value.device}; allowed: dense ones with values")
    return dict(found)


def _compare(path: Path) -> None:
    """Verify the CRC of every part of an archive."""
    with zipfile.ZipFile(path) as archive:
        if packed := [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]:
            raise ValueError(f"part {packed[0]} is compressed")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"part {damaged} does not match its checksum")
