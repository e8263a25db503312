import json
import struct

import numpy as np
import pytest

from longtrain.data.read.mds import read_mds_shard
from longtrain.errors import DataError

COLUMNS = [
    ("domain", "str", None),
    ("indices", "ndarray:uint32", None),
    ("input_ids", "ndarray:uint32", None),
    ("length", "uint64", 8),
]


def array(values):
    kind = 0 if max(values.shape) < 256 else 1
    shape = np.array(values.shape, [np.uint8, np.uint16][kind])
    return bytes([(values.ndim << 2) | kind]) + shape.tobytes() + values.astype(np.uint32).tobytes()


def shard(samples, columns=COLUMNS):
    """Bytes of a shard, by the format's description."""
    bodies = []
    for sample in samples:
        parts = [sample["domain"].encode(), array(sample["indices"]), array(sample["input_ids"])]
        sizes = struct.pack("<3I", *map(len, parts))
        bodies.append(sizes + b"".join(parts) + struct.pack("<Q", sample["length"]))
    names, encodings, fixed = zip(*columns, strict=True)
    header = json.dumps(
        {"column_names": names, "column_encodings": encodings, "column_sizes": fixed}
    ).encode()
    at = 4 + 4 * (len(samples) + 1) + len(header)
    offsets = np.cumsum([at, *map(len, bodies)]).astype(np.uint32)
    return struct.pack("<I", len(samples)) + offsets.tobytes() + header + b"".join(bodies)


SAMPLES = [
    {"domain": "book", "indices": np.array([[0, 3], [3, 300]]), "input_ids": np.arange(300), "length": 300},
    {"domain": "arxiv", "indices": np.array([[0, 2]]), "input_ids": np.array([128000, 7]), "length": 2},
]


def test_samples_come_back(tmp_path):
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(shard(SAMPLES))
    read = list(read_mds_shard(path))
    for sample, wanted in zip(read, SAMPLES, strict=True):
        assert sample["domain"] == wanted["domain"] and sample["length"] == wanted["length"]
        assert np.array_equal(sample["input_ids"], wanted["input_ids"])
        assert np.array_equal(sample["indices"], wanted["indices"])


def test_a_shard_cut_short_or_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "shard.mds"
    path.write_bytes(shard(SAMPLES)[:-10])
    with pytest.raises(DataError, match="cut short"):
        list(read_mds_shard(path))
    path.write_bytes(b"not a shard at all, only some text that is long enough")
    with pytest.raises(DataError, match="not an MDS shard"):
        list(read_mds_shard(path))
    path.write_bytes(shard(SAMPLES, [("domain", "pkl", None), *COLUMNS[1:]]))
    with pytest.raises(DataError, match="pkl"):
        list(read_mds_shard(path))
