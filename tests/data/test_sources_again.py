"""Sources that are tokens already: taken from other prepared data, and the same as if tokenised anew."""

import json
from pathlib import Path

import pytest

from longtrain.data.chat import tokenise
from longtrain.data.packing.prepare import prepare
from longtrain.data.packing.prepared import Prepared

from .test_preparation import chats, config


@pytest.fixture
def sources(tmp_path):
    made = []
    for name in ("books", "notes"):
        folder = tmp_path / name
        folder.mkdir()
        for i in range(12):
            (folder / f"{name[0]}{i}.txt").write_text(f"Number {i} of the {name}. " * (i + 1))
        made.append({"text": str(folder), "kind": name})
    return [*made, {"conversations": chats(tmp_path)}]


@pytest.fixture
def reads(monkeypatch):
    """The sources whose documents are read, in their order."""
    seen = []
    real = tokenise.documents

    def documents(source, *rest, **options):
        seen.append(source.where.rpartition("/")[2])
        return real(source, *rest, **options)

    monkeypatch.setattr(tokenise, "documents", documents)
    return seen


def made(home, tokenizer, *sources, name="mine", **values):
    settings = {"val_fraction": 0.2, "on_error": "skip", **values}
    data = Prepared.open(prepare(config(*sources, **{**settings, "name": name}), tokenizer, home=home))
    return data


def same(one, other):
    """Everything but where the data is, and what it is called."""
    left, right = ({k: v for k, v in data.manifest.items() if k != "name"} for data in (one, other))
    assert left == right  # has the hashes of all files


def test_a_mixture_with_one_more_source_tokenises_that_one(tokenizer, sources, tmp_path, reads, caplog):
    books, notes, chat = sources
    made(tmp_path / "a", tokenizer, books, chat, name="first")
    reads.clear()
    with caplog.at_level("INFO"):
        second = made(tmp_path / "a", tokenizer, notes, chat, {**books, "weight": 3}, name="second")
    assert reads == ["notes"] and "data=" in caplog.text
    same(second, made(tmp_path / "b", tokenizer, notes, chat, {**books, "weight": 3}))
    reads.clear()
    third = made(
        tmp_path / "a", tokenizer, books, notes, name="third"
    )  # in another place, so others are held out
    assert reads == [] and third.val.any()
    same(third, made(tmp_path / "c", tokenizer, books, notes))


def test_counts_are_those_of_the_first_reading(tokenizer, sources, tmp_path, reads):
    with Path(sources[2]["conversations"]).open("a") as file:
        file.write("{oops\n")
    (tmp_path / "notes" / "n.txt").write_text("A note.")
    short = {"min_doc_tokens": 13}
    first = made(tmp_path / "a", tokenizer, *sources, **short)
    assert first.manifest["read"]["bad"] == 1 and first.manifest["read"]["short"] == 1
    reads.clear()
    again = made(tmp_path / "a", tokenizer, *sources, name="again", **short)
    assert reads == [] and again.manifest["read"] == first.manifest["read"]
    same(first, again)


def test_the_former_state_of_the_same_data_serves_what_did_not_change(tokenizer, sources, tmp_path, reads):
    first = made(tmp_path / "a", tokenizer, *sources)
    (tmp_path / "notes" / "n3.txt").write_text("Another text, which is longer than the first one was.")
    reads.clear()
    changed = made(tmp_path / "a", tokenizer, *sources)
    assert reads == ["notes"] and changed.folder == first.folder
    same(changed, made(tmp_path / "b", tokenizer, *sources))


@pytest.mark.parametrize(
    "change",
    [{"append_eos": True}, {"min_doc_tokens": 9}, {"seed": 1}, {"mask": "all"}, {"val_fraction": 0.5}],
)
def test_another_setting_is_noticed(tokenizer, sources, tmp_path, reads, change):
    made(tmp_path / "a", tokenizer, *sources, name="first")
    reads.clear()
    made(tmp_path / "a", tokenizer, *sources, name="second", **change)
    assert reads == ["books", "notes", "chats.jsonl"]


def test_damaged_data_is_not_taken(tokenizer, sources, tmp_path, reads, caplog):
    first = made(tmp_path / "a", tokenizer, *sources, name="first")
    ids = first.folder / "ids.npy"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-2] + b"\1\1")
    reads.clear()
    second = made(tmp_path / "a", tokenizer, *sources, name="second")
    assert len(reads) == 3 and "its sources are tokenised again" in caplog.text
    assert (second.folder / "ids.npy").read_bytes() == whole


def test_prompts_that_are_held_out_with_their_text_are_made_anew(tokenizer, sources, tmp_path, reads):
    cut = {"prompt_tokens": [4, 16], "answer_tokens": 4}
    several = {**sources[0], "prompts": 3}
    first = made(tmp_path / "a", tokenizer, several, sources[1], name="first", **cut)
    assert [("key" in one) for one in first.manifest["sources"]] == [False, True]
    reads.clear()
    second = made(tmp_path / "a", tokenizer, sources[1], several, name="second", **cut)
    assert reads == ["books"]
    same(second, made(tmp_path / "b", tokenizer, sources[1], several, **cut))


def test_an_interrupted_copy_leaves_nothing(tokenizer, sources, tmp_path, monkeypatch):
    made(tmp_path / "a", tokenizer, *sources, name="first")

    def stopped(*_):
        raise KeyboardInterrupt

    before = {path.name for path in (tmp_path / "a" / "data").iterdir()}
    monkeypatch.setattr(tokenise.HeldOut, "complete", stopped)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "a", tokenizer, *sources, name="second")
    after = {path.name for path in (tmp_path / "a" / "data").iterdir()}
    assert all(name.endswith(".lock") for name in after - before)


def test_a_source_with_synthetic_ones_beside_it_is_tokenised(tokenizer, sources, tmp_path):
    """They write into its text, of which prepared data has not all."""
    first = made(tmp_path / "a", tokenizer, sources[0])
    keyed = json.loads((first.folder / "manifest.json").read_text())["sources"]
    assert len(keyed[0]["key"]) == 64
    synthetic = {"synthetic": "questions", "rows": 2}
    from longtrain.data.config import SourceConfig
    from longtrain.data.packing.prepare import _source_key

    mixed = config(sources[0], synthetic)
    assert _source_key(mixed, SourceConfig.parse(sources[0]), {"files": []}, "", None) is None
