"""Files of `torch.save`, read without running what they may hold, and compared with their own checksums."""

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
    """What a file of `torch.save` holds, on the CPU.

    Torch writes a zip archive with a CRC-32 for each part and does not compare it when it reads; here all are
    compared first. Files of before PyTorch 1.6 are no archives and have none.

    Args:
        path: of the file.
        mmap: leave the tensors in the file until they are used, where it is an archive.

    Raises:
        OSError: it is missing, cannot be read, or is no regular file.
        ValueError: it is damaged, or holds more than containers, numbers, texts and tensors; one sentence.
    """
    import torch

    need_regular(path)
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            _compare(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about protocols of pickles
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive and mmap)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) or "Weights only" in str(error):  # torch's advice is to run it
            raise ValueError("it holds more than tensors, and nothing in such a file is run") from None
        raise ValueError(first_line(error)) from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(first_line(error)) from None
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        NotImplementedError,
        RecursionError,
        RuntimeError,
        TypeError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(first_line(error)) from None


def read_pickled_tensors(path: Path, *, mmap: bool = False) -> dict[str, Tensor]:
    """The tensors by name of a file of `torch.save`; see `read_pickled`.

    Raises:
        OSError: see `read_pickled`.
        ValueError: see there; or it holds another thing than dense tensors by name.
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
    """Compare every part of an archive with its CRC.

    Raises:
        ValueError: one differs, or is compressed, which torch never does.
    """
    with zipfile.ZipFile(path) as archive:
        if packed := [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]:
            raise ValueError(f"part {packed[0]} is compressed")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"part {damaged} does not match its checksum")
