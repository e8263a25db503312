import json
import os
import pickle

import numpy as np
import pytest

from longtrain.data.packing.checks import sha256_file
from longtrain.data.packing.prepared import CHECKSUM, FILES, Prepared, PreparedWriter
from longtrain.errors import DataError
from longtrain.files import json_sha256


def inside(folder):
    return [path.name for path in folder.iterdir()]


def test_what_is_written_is_read(make_prepared):
    data = make_prepared([3, 5], masks=[[0, 1, 1], [1, 1, 0, 0, 1]], val=[1], kinds=["book", "code"])
    assert data.ids.tolist() == list(range(8)) and data.ids.dtype == np.uint32
    assert data.mask.tolist() == [0, 1, 1, 1, 1, 0, 0, 1]
    assert data.start.tolist() == [0, 3] and data.length.tolist() == [3, 5] and data.labels.tolist() == [2, 2]
    assert (
        data.val.tolist() == [False, True]
        and data.names == ["doc0", "doc1"]
        and data.kinds == ["book", "code"]
    )
    assert data.manifest["counts"]["val_tokens"] == 5
    assert Prepared.open(data.folder).labels.tolist() == [2, 2]
    assert pickle.loads(pickle.dumps(data)).ids.tolist() == data.ids.tolist()


def test_small_vocabularies_take_two_bytes_a_token(tmp_path):
    writer = PreparedWriter(tmp_path, 65536)
    writer.add(np.array([65535, 0]), np.array([1, 1]), name="a\nb", kind="x")
    writer.close({})
    assert np.load(tmp_path / "ids.npy").dtype == np.uint16
    assert (tmp_path / "names.txt").read_text() == "a b\n"


@pytest.mark.parametrize("ids", [[5, 10], [-1, 2]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, ids):
    with pytest.raises(DataError, match=f"document d: token id {max(ids) if ids[0] > 0 else -1} .* 10"):
        PreparedWriter(tmp_path, 10).add(np.array(ids), np.array([1, 1]), name="d", kind="x")


@pytest.mark.parametrize("name", ["ids.npy", "mask.npy", "docs.npz", "names.txt"])
def test_damage_is_found(make_prepared, name):
    folder = make_prepared([400, 300]).folder
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name} is damaged.*prepare again"):
        Prepared.open(folder)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=rf"{name} is damaged: its sha256 .*prepare again"):
        Prepared.open(folder)
    path.unlink()
    with pytest.raises(DataError, match=r"No such file.*prepare again"):
        Prepared.open(folder)
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"not a regular file.*prepare again"):
        Prepared.open(folder)


def reseal(folder, **arrays):
    """Change columns of the index, or the ids, and the manifest's hashes with them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if "ids" in arrays:
        np.save(folder / "ids.npy", arrays.pop("ids"))
    with np.load(folder / "docs.npz") as columns:
        np.savez(folder / "docs.npz", **{**columns, **arrays})
    manifest["sha256"] = {name: sha256_file(folder / name) for name in FILES}
    del manifest[CHECKSUM]
    (folder / "manifest.json").write_text(json.dumps({**manifest, CHECKSUM: json_sha256(manifest)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": [500, -100]}, "document of length -100"),
        ({"start": [0, 390]}, "overlap or leave a gap"),
        ({"length": [300, 300]}, "overlap or leave a gap"),
        ({"labels": [400, 1]}, "more labels than tokens"),
        ({"kind": [0, 1]}, "kind that the manifest does not name"),
        ({"source": [0, -1]}, "source that the manifest gives no weight"),
        ({"start": [0.0, 400.0]}, "other shapes or types"),
        ({"val": [[False], [False]]}, "other shapes or types"),
        ({"ids": np.full(700, 1 << 20, np.uint32)}, "token id 1048576, outside the vocabulary of 1048576"),
        ({"ids": np.zeros(700, np.float32)}, "other shapes or types"),
    ],
)
def test_an_index_that_does_not_fit_is_refused_whatever_the_hashes_say(make_prepared, change, message):
    folder = make_prepared([400, 300]).folder
    reseal(folder, **{name: np.asarray(values) for name, values in change.items()})
    with pytest.raises(DataError, match=message):
        Prepared.open(folder)


def test_data_without_checksums_is_prepared_again_and_a_target_refuses_a_larger_vocabulary(make_prepared):
    data = make_prepared([40])
    data.refuse_ids_above(40)
    with pytest.raises(DataError, match="token id 39, outside the vocabulary of 39"):
        data.refuse_ids_above(39)
    manifest = data.folder / "manifest.json"
    values = {key: value for key, value in json.loads(manifest.read_text()).items() if key != CHECKSUM}
    values["sha256"] = {}
    manifest.write_text(json.dumps({**values, CHECKSUM: json_sha256(values)}))
    with pytest.raises(DataError, match=r"without checksums.*longtrain prepare"):
        Prepared.open(data.folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"weights": [\n  1.0', '"weights": [\n  2.0'), ('"pad_id": 3', '"pad_id": 4'), ("doc_kind", "x")],
)
def test_an_edited_manifest_is_refused(tmp_path, old, new):
    writer = PreparedWriter(tmp_path, 100)
    writer.add(np.arange(9), np.ones(9), name="d", kind="doc_kind")
    writer.close({"weights": [1.0], "pad_id": 3})
    Prepared.open(tmp_path)
    file = tmp_path / "manifest.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DataError, match=r"manifest\.json is damaged, or of another format; prepare again"):
        Prepared.open(tmp_path)


@pytest.mark.parametrize("format", [1, 2, 3])
def test_a_manifest_without_its_checksum_or_of_another_format_is_refused(make_prepared, format):
    folder = make_prepared([10]).folder
    file = folder / "manifest.json"
    values = {**json.loads(file.read_text()), "format": format}
    del values[CHECKSUM]
    if format == 3:
        values[CHECKSUM] = json_sha256(values)
    file.write_text(json.dumps(values))
    with pytest.raises(DataError, match="is damaged, or of another format"):
        Prepared.open(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights", ["x"]),
        ("counts", {"documents": 1}),
        ("kinds", [1]),
        ("vocab_size", "many"),
        ("sources", [7]),
    ],
)
def test_a_manifest_of_wrong_types_is_refused_in_a_sentence(make_prepared, key, value):
    folder = make_prepared([10]).folder
    values = {**json.loads((folder / "manifest.json").read_text()), key: value}
    del values[CHECKSUM]
    (folder / "manifest.json").write_text(json.dumps({**values, CHECKSUM: json_sha256(values)}))
    with pytest.raises(DataError, match="is damaged, or of another format; prepare again"):
        Prepared.open(folder)


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"format": 0}', '{"format": 1}', "[" * 10**5])
def test_a_folder_without_a_whole_manifest_is_not_prepared(make_prepared, manifest):
    folder = make_prepared([10]).folder
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match="longtrain prepare"):
        Prepared.open(folder)
