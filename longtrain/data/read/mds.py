"""Reads MDS shards, the format of MosaicML's streaming library (version 2).

It is parsed here because that library needs complete data sets with an index, and a cloud client for each
store. A shard is: uint32 count n, uint32 offsets [n + 1], a JSON header, then the samples. A sample is the
uint32 sizes of its variable-size columns, then the bytes of all columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.errors import DataError
from longtrain.files import parse_json

MDS_SCALARS = {"int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
MDS_SHAPE_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def read_mds_shard(path: Path) -> Iterator[dict[str, Any]]:
    """Read the samples of one uncompressed MDS shard.

    Raises:
        DataError: the shard is cut short, or a column's encoding is not string, integer or array.
    """
    blob = np.memmap(path, np.uint8, mode="r")
    try:
        n = int(blob[:4].view(np.uint32)[0])
        offsets = np.frombuffer(blob[4 : 8 + 4 * n].tobytes(), np.uint32).astype(np.int64)
        header = parse_json(blob[8 + 4 * n : offsets[0]].tobytes())
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} is not an MDS shard ({error}); download it again") from error
    if n and offsets[-1] > len(blob):
        raise DataError(f"{path} is cut short: {len(blob)} of {offsets[-1]} bytes; download it again")
    columns = list(
        zip(header["column_names"], header["column_encodings"], header["column_sizes"], strict=True)
    )
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield _sample(blob[begin:end].tobytes(), columns, path)


def _sample(data: bytes, columns: list[tuple[str, str, int | None]], path: Path) -> dict[str, Any]:
    variable = [size is None for _, _, size in columns]
    at = 4 * sum(variable)
    given = iter(np.frombuffer(data[:at], np.uint32).tolist())
    sample = {}
    for name, encoding, size in columns:
        size = next(given) if size is None else size
        sample[name] = _decode(encoding, data[at : at + size], path)
        at += size
    return sample


def _decode(encoding: str, data: bytes, path: Path) -> Any:
    kind, _, dtype = encoding.partition(":")
    if kind == "str":
        return data.decode("utf-8")
    if kind in MDS_SCALARS:
        return int(np.frombuffer(data, np.int64 if kind == "int" else np.dtype(kind))[0])
    if kind == "ndarray" and dtype and ":" not in dtype:
        n_dims, shape_type = data[0] >> 2, np.dtype(MDS_SHAPE_TYPES[data[0] & 3])
        at = 1 + n_dims * shape_type.itemsize
        return np.frombuffer(data[at:], dtype).reshape(np.frombuffer(data[1:at], shape_type))
    raise DataError(
        f"{path}: column encoding '{encoding}' is not read here; known: str, integers, ndarray:TYPE"
    )
