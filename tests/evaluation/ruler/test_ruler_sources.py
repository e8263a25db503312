"""What prompts are made of: haystacks, word lists, question files; and what is said when they are wrong."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.ruler.questions import DATASETS
from longtrain.evaluation.ruler.sources import Haystack, Vocabulary, _wonderwords, vocabulary

TEXT = (
    'It rained.  Mr. Bell said: "Go!" She went\nat 3.5 miles an hour, e.g. slowly. "Why?" he asked. '
    "Nobody knew. J. Doe (of St. Ives) did not. 12 came. what now"
)


def test_sentences() -> None:
    hay = Haystack("t", TEXT)
    assert hay.sentences(len(hay.words)) == [
        "It rained.",
        'Mr. Bell said: "Go!"',
        "She went at 3.5 miles an hour, e.g. slowly.",
        '"Why?" he asked.',
        "Nobody knew.",
        "J. Doe (of St. Ives) did not.",
        "12 came. what now",
    ]
    assert hay.sentences(3) == ["It rained.", "Mr."]
    assert " ".join(hay.sentences(70)).split() == (hay.words * 3)[:70]


def test_haystacks_are_read(tmp_path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": "\n\nOne two.\n Three"}))
    (tmp_path / "b.txt").write_text("One two. Three")
    first, second = Haystack.read(tmp_path / "a.json"), Haystack.read(str(tmp_path / "b.txt"))
    assert first.words == ["", "One", "two.", "Three"]  # as officially: the empty word counts
    assert second.words == ["One", "two.", "Three"]
    assert (first.name, second.name) == ("a.json", "b.txt")
    assert first.digest != second.digest
    assert Haystack.read(tmp_path / "b.txt").digest == second.digest


@pytest.mark.parametrize("content", ["[]", '{"texts": "a b"}', '{"text": 3}', "{", '{"text": "word"}'])
def test_bad_haystacks(tmp_path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match="haystack"):
        Haystack.read(tmp_path / "a.json")
    with pytest.raises(DataError, match="no held-out text"):
        Haystack.read(tmp_path / "none.txt")


def test_a_short_haystack_is_repeated(make) -> None:
    (example,) = make("niah_single_2", length=2048, n=1, haystack=Haystack("t", TEXT))
    assert example.input.count("It rained.") > 10


def test_own_words() -> None:
    words = vocabulary()
    assert len(words.adjectives) * len(words.nouns) > 40_000
    assert len(words.pool) > 5_000
    assert list(words.pool) == sorted(set(words.pool))


def test_more_words(tmp_path, make) -> None:
    small = Vocabulary("small", ("red",), ("cat",), tuple(f"w{i}" for i in range(60)))
    with pytest.raises(DataError, match=r"'small' has 60; give a file of more"):
        make("cwe", length=8192, words=small)
    with pytest.raises(DataError, match=r"'small' make 1; use words=wonderwords"):
        make("niah_multikey_1", length=2048, words=small)
    (tmp_path / "list.json").write_text(json.dumps({str(i): f"m{i}" for i in range(900)}))
    (tmp_path / "list.txt").write_text("\n".join(f"m{i}" for i in range(900)))
    for name in ("list.json", "list.txt"):
        large = small.with_more(tmp_path / name)
        assert (large.name, len(large.more)) == (f"small+{name}", 900)
        assert large.digest != small.digest
        (example,) = make("cwe", length=8192, n=1, words=large)
        assert all(answer[0] == "m" for answer in example.answers)
    (tmp_path / "bad.json").write_text("3")
    for name in ("bad.json", "none.txt"):
        with pytest.raises(DataError, match="word list"):
            small.with_more(tmp_path / name)


@pytest.fixture
def fresh():
    """The package is looked for anew, before and after."""

    def forget() -> None:
        _wonderwords.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "wonderwords"]:
            del sys.modules[name]

    forget()
    yield
    forget()


def test_official_words(tmp_path, monkeypatch, fresh) -> None:
    """The files as the package has them; a stand-in, so that the test needs no download."""
    assets = tmp_path / "wonderwords" / "assets"
    assets.mkdir(parents=True)
    for folder in (assets.parent, assets):
        (folder / "__init__.py").touch()
    for kind, words in {"adjective": "blue\nold", "noun": "old\ncat\nTV", "verb": "run"}.items():
        (assets / f"{kind}list.txt").write_text(words)
    monkeypatch.syspath_prepend(tmp_path)
    words = vocabulary("wonderwords")
    assert words.adjectives == ("blue", "old")
    assert words.nouns == ("old", "cat", "TV")
    assert words.pool == ("TV", "blue", "cat", "old", "run")


def test_official_words_missing(fresh, monkeypatch) -> None:
    for name in ("wonderwords", "wonderwords.assets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"longtrain\[ruler\]"):
        vocabulary("wonderwords")


def test_the_package_itself(fresh) -> None:
    pytest.importorskip("wonderwords")
    words = vocabulary("wonderwords")
    assert (len(words.adjectives), len(words.nouns)) == (912, 6782)
    assert len(words.pool) > 8_000


def test_questions_are_read(questions, squad_rows, hotpot_rows) -> None:
    squad, hotpot = questions["qa_1"], questions["qa_2"]
    assert len(squad.items) == len(squad.documents) == 320
    first = squad.items[0]
    paragraphs = [paragraph["context"] for paragraph in squad_rows["data"][0]["paragraphs"]]
    assert squad.documents[first.own[0]] == paragraphs[0]
    assert [squad.documents[i] for i in first.near] == paragraphs[1:]
    assert list(hotpot.documents) == sorted(set(hotpot.documents))
    title, sentences = hotpot_rows[0]["context"][0]
    assert hotpot.documents[hotpot.items[0].own[0]] == f"{title}\n{''.join(sentences)}"
    assert hotpot.items[0].answers == (hotpot_rows[0]["answer"],)
    assert squad.digest != hotpot.digest


def broken(rows, *path):
    """Rows without what lies at a path."""
    rows = copy.deepcopy(rows)
    inner = rows
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return rows


def test_bad_question_files(tmp_path, squad_rows, hotpot_rows) -> None:
    file = tmp_path / "q.json"
    where = ("data", 0, "paragraphs", 0)
    bad_squad = [
        hotpot_rows,
        {},
        {"data": []},
        {"data": [{"paragraphs": [{"context": 3, "qas": []}]}]},
        broken(squad_rows, *where, "context"),
        broken(squad_rows, *where, "qas", 0, "is_impossible"),
        broken(squad_rows, *where, "qas", 0, "answers", 1, "text"),
        broken(broken(squad_rows, *where, "qas", 0, "answers", 1), *where, "qas", 0, "answers", 0),
    ]
    for rows in bad_squad:
        file.write_text(json.dumps(rows))
        with pytest.raises(DataError, match=r"question file .*q\.json"):
            DATASETS["squad"].read(file)
    bad_hotpot = [
        squad_rows,
        [],
        [3],
        broken(hotpot_rows, 5, "answer"),
        broken(hotpot_rows, 5, "context", 3, 1),
    ]
    for rows in bad_hotpot:
        file.write_text(json.dumps(rows))
        with pytest.raises(DataError, match=r"question file .*q\.json"):
            DATASETS["hotpotqa"].read(file)
    file.write_text("{")
    with pytest.raises(DataError, match="as JSON"):
        DATASETS["squad"].read(file)


def test_questions_are_needed_and_enough(make) -> None:
    with pytest.raises(ConfigError, match=r"pass suite.squad=FILE.*https://"):
        make("qa_1", length=2048, questions=None)
    assert make("qa_2", length=4096, n=1, start=119)[0].index == 119
    with pytest.raises(DataError, match=r"question 120 of hotpotqa\.json was asked for, it has 120"):
        make("qa_2", length=4096, n=1, start=120)


def test_documents_run_out_and_repeat(make, questions) -> None:
    (example,) = make("qa_1", length=32768, n=1)
    total = len(questions["qa_1"].documents)
    assert example.size > total
    assert example.input.count(questions["qa_1"].documents[5]) >= example.size // total
    assert example.answers[0] in example.input
