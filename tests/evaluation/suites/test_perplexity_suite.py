from __future__ import annotations

import gzip
import json
import math

import pytest
import torch
from byte_target import byte_target, byte_tokenizer
from torch.nn.functional import cross_entropy

from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation import corpora
from longtrain.evaluation.records import Record
from longtrain.evaluation.suites import perplexity
from longtrain.methods import policies
from longtrain.targets.tokenizer import read_tokenizer

TEXT = "It was a dark and stormy night; the rain fell in torrents \u2013 caf\u00e9, \U0001f600. " * 6
SMALL = {"name": "perplexity", "window": 64, "stride": 16, "first_windows": True}
SMALL |= {"max_tokens": None, "limit": None}


@pytest.fixture(scope="module")
def target():
    return byte_target(begin=True, dtype=torch.float64)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "rain.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def build(target, text, **settings):
    return perplexity.build({**SMALL, "texts": [str(text)], **settings}, target, seed=0, sampling=Sampling())


def summary(suite, target, parts=Parts()):  # noqa: B008 (frozen)
    records = {}
    for task in suite.tasks:
        rows = list(task.examples())
        found = [
            one for at in range(0, len(rows), 3) for one in task.measure(target, parts, rows[at : at + 3])
        ]
        records[task.name] = [
            Record("full", task.name, row.id, {}, measures=one) for row, one in zip(rows, found, strict=True)
        ]
    return suite.summary(records), records


def test_the_full_cache_is_plain_sliding_perplexity(target, text):
    """Reference: every window as one forward, the labels of its context left out."""
    suite = build(target, text)
    found, records = summary(suite, target)
    ids = torch.tensor(target.tokenizer(TEXT).input_ids)
    assert ids[0] == 256 and len(ids) == len(TEXT.encode()) + 1
    nats = tokens = previous = 0
    for begin in range(0, len(ids), 16):
        end = min(begin + 64, len(ids))
        window = ids[begin:end]
        labels = window.clone()
        labels[: -(end - previous)] = -100
        hidden = target.packed(window, torch.arange(len(window)), (0, len(window))).hidden[-1]
        nats += float(cross_entropy(target.head(hidden)[:-1], labels[1:], reduction="sum"))
        tokens += int((labels[1:] != -100).sum())
        previous = end
        if end == len(ids):
            break
    assert tokens == len(ids) - 1
    assert found.tasks["rain.txt"] == round(math.exp(nats / tokens), 4)
    assert sum(record.measures["nats"] for record in records["rain.txt"]) == pytest.approx(nats, rel=1e-12)
    extra = found.extra["texts"]["rain.txt"]
    assert extra == {
        "tokens": tokens,
        "bytes": len(TEXT.encode()),
        "bits_per_byte": round(nats / math.log(2) / len(TEXT.encode()), 4),
    }


def test_eviction_reaches_the_figures(target, text):
    suite = build(target, text)
    full, _ = summary(suite, target)
    parts = Parts(evictor=policies.get("streaming_llm", budget=Budget(8)))
    found, records = summary(suite, target, parts)
    assert found.tasks != full.tasks
    kept = [record.measures["kept_entries"] for record in records["rain.txt"]]
    assert kept == [1.0] + [8.0] * (len(kept) - 1)
    later = build(target, text, first_windows=False)
    assert [row.id for row in later.tasks[0].rows] == [row.id for row in suite.tasks[0].rows][1:]
    assert any("left out" in note for note in later.summary({}).notes)
    assert suite.needs == {"evictor", "selector"} and not suite.scale.higher_is_better


def test_windows_and_texts_are_pinned_and_limits_are_told(target, text, tmp_path):
    task = build(target, text).tasks[0]
    settings = task.settings()
    assert settings["rows"] == len(task.rows) and settings["window"] == 64
    assert build(target, text).tasks[0].settings() == settings
    assert build(target, text, stride=32).tasks[0].settings() != settings
    (tmp_path / "rain.txt").write_text(TEXT.replace("dark", "calm"), encoding="utf-8")
    changed = build(target, text).tasks[0].settings()
    assert [key for key in settings if settings[key] != changed[key]] == ["tokens_sha256"]
    for limits in ({"limit": 2}, {"max_tokens": 100}):
        suite = build(target, text, **limits)
        assert any("the beginning only of rain.txt" in note for note in suite.summary({}).notes)
    assert len(build(target, text, limit=2).tasks[0].rows) == 2
    assert not any("beginning" in note for note in build(target, text).summary({}).notes)


def test_corpora_join_their_texts_or_not(target, tmp_path):
    rows = tmp_path / "pages.jsonl.gz"
    rows.write_bytes(gzip.compress("\n".join(json.dumps({"text": t}) for t in ("ab", "", "cd")).encode()))
    alone = build(target, rows).tasks[0]
    assert [ids.tolist()[0] for ids in alone.ids] == [256, 256, 256]
    assert [row.id for row in alone.rows] == ["pages.jsonl.gz:1@1", "pages.jsonl.gz:3@1"]
    joined = build(target, rows, texts=[{"from": str(rows), "join": "\n\n", "name": "all"}]).tasks[0]
    assert joined.name == "all" and len(joined.ids) == 1
    alone = "each text of pages.jsonl.gz is read alone"
    assert any(alone in note for note in build(target, rows).summary({}).notes)
    whole = build(target, rows, texts=[{"from": str(rows), "join": ""}]).summary({}).notes
    assert not any("read alone" in note for note in whole)
    assert target.tokenizer.decode(joined.ids[0][1:]) == "ab\n\n\n\ncd"
    first = build(target, rows, texts=[{"from": str(rows), "join": "", "limit": 1}])
    assert target.tokenizer.decode(first.tasks[0].ids[0][1:]) == "ab"
    assert any("the first 1 texts of pages.jsonl.gz" in note for note in first.summary({}).notes)


def test_bytes_of_tokens_are_those_of_the_text():
    for tokenizer in (byte_tokenizer(), read_tokenizer("tiny")[0]):
        made = corpora.tokenise(tokenizer, "t", TEXT)
        assert made.bytes_T[-1] == len(TEXT.encode()) and len(made.bytes_T) == len(made.ids_T) + 1
        ids, at = made.ids_T.tolist(), TEXT.index("stormy")
        upto = next(n for n in range(len(ids)) if len(tokenizer.decode(ids[:n])) >= at)
        assert made.bytes_T[upto] == len(tokenizer.decode(ids[:upto]).encode())


def test_the_bundled_text_can_be_measured(target):
    suite = build(target, "", texts=["bundled:heldout"], max_tokens=200)
    assert [task.name for task in suite.tasks] == ["bundled:heldout"]
    assert sum(len(ids) for ids in suite.tasks[0].ids) == 201


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"stride": 64}, ConfigError, r"suite.window=64, suite.stride=64; allowed: stride < window <= 2048"),
        ({"window": "4k"}, ConfigError, r"suite.window=4096"),
        ({"stride": "few"}, ConfigError, "suite.stride=few; allowed: a token count"),
        ({"texts": []}, ConfigError, r"suite.texts=\[\]; allowed: one or more"),
        ({"texts": ["wikitext3"]}, ConfigError, "no text at wikitext3; .* wikitext2"),
        ({"texts": [{"from": "c4", "colour": 1}]}, ConfigError, "suite.texts=.*colour"),
        ({"texts": [{"join": " "}]}, ConfigError, "suite.texts="),
        ({"texts": ["c4", {"from": "c4"}]}, ConfigError, "different names"),
        ({"texts": ["c4"]}, DataError, "corpus c4: .*a local copy can be given by its path"),
        ({"limit": 0}, ConfigError, "suite.limit=0"),
    ],
)
def test_wrong_settings_are_named(target, text, settings, error, message, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(error, match=message):
        build(target, text, **settings)


def test_settings_are_those_of_the_configuration(settings_of):
    assert set(settings_of("perplexity")) == {*SMALL, "texts", "budgets", "batch"}


def test_a_text_too_short_and_a_row_without_text(target, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="has no 2 tokens"):
        build(target, tmp_path / "empty.txt")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has no column 'text'"):
        build(target, tmp_path / "rows.jsonl")
