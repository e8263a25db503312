"""`longtrain prepare` for the eviction recipe of the bundled target, offline, end to end."""

import json
import re

import numpy as np
import pytest

from longtrain import cli
from longtrain.data.chat.mask import spans
from longtrain.data.packing.prepared import Prepared

SMALL = (
    "+recipe=lookaheadkv_tiny",
    "quiet=true",
    "data.prompt_tokens=[200,280]",
    "data.questions=6",
    "data.answer_tokens=6",
    "data.sources.0.prompts=1",
    "data.sources.1.prompts=1",
)


def prepared(monkeypatch, home, *overrides):
    monkeypatch.setattr("sys.argv", ["longtrain", "prepare", *SMALL, f"home={home}", *overrides])
    cli.main()
    (folder,) = (home / "data").glob("lookaheadkv_tiny-*/")
    return Prepared.open(folder, verify=True)


def test_the_target_answers_questions_and_goes_on_with_novels(monkeypatch, tmp_path, capsys):
    data = prepared(monkeypatch, tmp_path, "show=2")
    shown = capsys.readouterr().out
    assert "label, to be predicted" in shown and "labels of" in shown
    assert data.names[:7] == [name for name in data.names if "#" not in name]
    answers = next((tmp_path / "data").glob("*.answers.jsonl")).read_text().splitlines()
    said = [len(json.loads(answer)["ids"]) > 1 for answer in answers]  # not the end mark alone
    asked = [f"questions#{i}" for i in range(6)]
    assert len(said) == 13 and len(data.names) == sum(said)  # an empty answer has nothing to learn from
    assert data.names[7:] == [name for name in asked if name in data.names] and len(data.names) > 9
    assert {"book"} < set(data.kinds) <= {"book", "needles", "chains", "table", "quote"}
    for start, length in zip(data.start.tolist(), data.length.tolist(), strict=True):
        ((begin, end),) = spans(np.asarray(data.mask[start : start + length]))
        assert end == length and 200 <= begin <= 280 and end - begin <= 6
    assert not any(val for name, val in zip(data.names, data.val, strict=True) if name.startswith("doyle"))
    before = data.folder.joinpath("manifest.json").stat().st_mtime_ns
    again = prepared(monkeypatch, tmp_path)  # nothing changed: nothing is done
    assert again.folder.joinpath("manifest.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_parts_write_the_answers_that_one_process_writes(monkeypatch, tmp_path, capsys):
    whole = prepared(monkeypatch, tmp_path / "whole")
    words = ["longtrain", "prepare", *SMALL, f"home={tmp_path / 'parts'}", "shards=2"]
    monkeypatch.setattr("sys.argv", [*words, "shard=1"])
    cli.main()
    assert not list((tmp_path / "parts" / "data").glob("*/manifest.json"))
    parts = prepared(monkeypatch, tmp_path / "parts", "shards=2", "shard=0")
    assert parts.manifest["sha256"] == whole.manifest["sha256"] and len(whole.names) > 9
    lines = [file.read_text().splitlines() for file in (tmp_path / "parts").rglob("*.answers.*.jsonl")]
    assert len(lines) == 2 and all(lines) and sum(map(len, lines)) == 13
    for wrong, message in (("shard=2", "shard=2 shards=2; allowed: 0 to 1"), ("shard=x", "allowed: a whole")):
        monkeypatch.setattr("sys.argv", [*words, wrong])
        with pytest.raises(SystemExit):
            cli.main()
        assert message in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*words, "shard=0", "data.answers=source"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "shards=2 splits the answers that the target writes" in capsys.readouterr().err


@pytest.mark.parametrize("question", ["prompt", "response"])
def test_gold_answers_with_the_question_in_or_out_of_the_prompt(monkeypatch, tmp_path, question):
    from transformers import AutoTokenizer

    from longtrain.assets import asset_dir

    tokenizer = AutoTokenizer.from_pretrained(asset_dir("bundled") / "tiny")
    overrides = (
        "data.answers=source",
        "data.answer_tokens=64",
        "+data.sources.2.options.tasks=[needles]",
    )
    data = prepared(monkeypatch, tmp_path, *overrides, f"data.question={question}")
    at = data.names.index("questions#0")
    ids = data.ids[data.start[at] : data.start[at] + data.length[at]]
    mask = np.asarray(data.mask[data.start[at] : data.start[at] + data.length[at]]).astype(bool)
    labels, read = (tokenizer.decode(ids[part].tolist()) for part in (mask, ~mask))
    begun = r"What .*\?<\|assistant\|>The special magic numbers? for .* provided text (is|are)"
    values = r"( \d{7}[,.])+<\|end\|>"
    assert bool(re.search(f"{begun}$", read)) == (question == "prompt")
    assert re.fullmatch(values if question == "prompt" else rf"\n{begun}{values}", labels)


def test_training_refuses_a_stage_that_cuts_prompts_from_their_answers(monkeypatch, tmp_path, capsys):
    stage = "data.stages=[{fraction: 1.0, sequence_tokens: 1024, doc_tokens: 128}]"
    argv = ["longtrain", "train", *SMALL, "data.answers=source", stage, f"home={tmp_path}", "job=train"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit):
        cli.main()
    assert "doc_tokens=128 would cut document" in "".join(capsys.readouterr())
