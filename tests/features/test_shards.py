"""FeatureFiles on disk: damage is named, a full disk leaves nothing half-written, ranks share a folder."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace

import pytest
import torch

from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.features import identity
from longtrain.features.forms import Form
from longtrain.features.shards import FeatureFiles, key_of

IDENTITY = identity.Identity("tiny", "aa" * 32, "excerpt", "bb" * 32, Form())


def some(number, tokens=50):
    return {"k.1": torch.full((tokens, 2, 8), float(number)).bfloat16(), "v.1": torch.randn(tokens, 2, 8)}


def filled(folder, numbers, *, rank=0, shard_bytes=1 << 20):
    shards = FeatureFiles(folder, rank=rank, shard_bytes=shard_bytes)
    for number in numbers:
        shards.add(f"{number:040d}", some(number), kind="row", outputs="kv=1", name=f"doc{number}")
    return shards


def test_a_flipped_bit_names_the_shard_and_the_document(tmp_path):
    filled(tmp_path, range(4)).close()
    file = tmp_path / "rank0-000000.safetensors"
    sound = file.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    seen = set()
    for at in range(header, len(sound), 1777):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 16]) + sound[at + 1 :])
        shards, wrong = FeatureFiles(tmp_path), []
        for number in range(4):
            try:
                assert (shards.read(f"{number:040d}", f"doc{number}")["k.1"] == number).all()
            except DataError as error:
                wrong.append(number)
                said = str(error)
                assert f"{file} is damaged at document doc{number} of 50 tokens" in said
                assert "\n" not in said and "features=fill" in said
        assert len(wrong) == 1  # the others are read
        seen |= set(wrong)
    assert seen == {0, 1, 2, 3}
    for cut in (4, header // 2, len(sound) - 1):
        file.write_bytes(sound[:cut])
        with pytest.raises(DataError, match=r"rank0-000000.safetensors is damaged at document doc1"):
            FeatureFiles(tmp_path).read(f"{1:040d}", "doc1")


def test_a_deleted_shard_is_filled_again_and_a_kill_loses_what_was_not_written(tmp_path):
    shards = filled(tmp_path, range(6), shard_bytes=5000)  # two documents a shard
    shards.add(f"{9:040d}", some(9), kind="row", outputs="kv=1", name="doc9")
    assert len(shards) == 7
    del shards  # a kill: nothing is closed
    with (tmp_path / "rank0.jsonl").open("ab") as torn:
        torn.write(b'{"shard": "rank0-0000')
    assert len(FeatureFiles(tmp_path)) == 6
    (tmp_path / "rank0-000001.safetensors").unlink()
    again = FeatureFiles(tmp_path)
    assert len(again) == 4 and f"{2:040d}" not in again
    again.add(f"{2:040d}", some(2), kind="row", outputs="kv=1", name="doc2")
    again.close()
    after = FeatureFiles(tmp_path)
    assert len(after) == 5 and (after.read(f"{2:040d}", "doc2")["k.1"] == 2).all()
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "rank0-000000.safetensors",
        "rank0-000002.safetensors",
        "rank0-000003.safetensors",
    ]


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    filled(tmp_path, [0]).close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shards = filled(tmp_path, [1, 2, 3])
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(LongtrainError, match=r"cannot write .*rank0-000001.safetensors") as error:
            shards.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(FeatureFiles(tmp_path)) == 1


def test_ranks_write_files_of_their_own_and_read_all(tmp_path):
    one, two = filled(tmp_path, [0]), filled(tmp_path, [1], rank=1)
    assert not one.many
    one.close()
    two.close()
    again = [FeatureFiles(tmp_path, rank=rank) for rank in (0, 1)]
    assert all(len(shards) == 2 and shards.many for shards in again)
    again[1].add(f"{5:040d}", some(5), kind="row", outputs="kv=1", name="doc5")
    again[1].flush()
    assert f"{5:040d}" not in again[0]
    again[0].look()
    assert (again[0].read(f"{5:040d}", "doc5")["k.1"] == 5).all()
    with pytest.raises(ConfigError, match=r"rank1.jsonl is being written by another run"):
        FeatureFiles(tmp_path, rank=1).claim()


def test_a_damaged_index_is_named(tmp_path):
    filled(tmp_path, [0]).close()
    index = tmp_path / "rank0.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"tokens": 50', b'"tokens" 50'))
    with pytest.raises(DataError, match=r"rank0.jsonl line 1 cannot be read: .*checksum"):
        FeatureFiles(tmp_path)


def test_features_of_something_else_are_refused_with_both_named(tmp_path):
    IDENTITY.write(tmp_path)
    there = identity.read(tmp_path)
    IDENTITY.check(tmp_path, there)
    others = {
        r"are of target tiny \(aaaa.*target is other \(cccc": replace(
            IDENTITY, target="other", weights="cc" * 32
        ),
        r"are of data excerpt \(bbbb.*data is books \(dddd": replace(IDENTITY, data="books", rows="dd" * 32),
        r"have features.form=bf16 features.top_k=0, .* features.form=int8 features.top_k=64": replace(
            IDENTITY, form=Form("int8", 64)
        ),
    }
    for message, mine in others.items():
        with pytest.raises(ConfigError, match=message) as error:
            mine.check(tmp_path, there)
        assert "\n" not in str(error.value) and "features.folder=OTHER" in str(error.value)
    replace(IDENTITY, target="the same by another path").check(tmp_path, there)
    (tmp_path / identity.NAME).write_text("{}")
    with pytest.raises(DataError, match=r"features.json cannot be read"):
        identity.read(tmp_path)


def test_a_key_tells_tokens_and_questions_apart():
    ids_T = torch.arange(9)
    assert (
        len({key_of(ids_T, "a"), key_of(ids_T, "b"), key_of(ids_T[:8], "a"), key_of(ids_T.clone(), "a")}) == 3
    )
