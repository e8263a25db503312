from __future__ import annotations

import json

import pytest

from longtrain.jobs import plan, prepare

STAGE = "data.stages=[{epochs: 2, row_tokens: 64, doc_tokens: 32}]"


@pytest.mark.parametrize("rows", ["trainer.accumulate_grad_batches=1", "trainer.rows_per_step=2"])
def test_prepared_data_gives_the_steps_of_an_epoch(composed, text, tmp_path, monkeypatch, rows):
    for number in range(12):
        (text / f"more{number}.txt").write_text(f"Chapter {number}. " * 40)
    data = ("data=text", f"data.text={text}", "data.val_fraction=0.5", STAGE)
    prepare.run(composed("prepare", *data))
    (manifest,) = (tmp_path / "data").glob("*/manifest.json")
    counts = json.loads(manifest.read_text())["counts"]
    tables = []
    monkeypatch.setattr(plan, "of_rows", lambda rows, columns, **_: tables.append(rows) or "")
    plan.run(composed("plan", "method=longspec", *data, "devices=2", rows))
    steps = 2 * (counts["tokens"] - counts["val_tokens"]) // (64 * 2)
    assert steps > 2 and [row["steps"] for row in tables[0]] == [steps]


def test_without_data_the_steps_are_not_known(composed, text, monkeypatch):
    tables = []
    monkeypatch.setattr(plan, "of_rows", lambda rows, columns, **_: tables.append(rows) or "")
    plan.run(composed("plan", "method=longspec", "data=text", f"data.text={text}", STAGE))
    assert tables[0][0]["steps"] is None


def test_no_times_on_a_processor_and_what_prepare_writes_is_told(composed, text, monkeypatch, capsys):
    tables = []
    monkeypatch.setattr(plan, "of_rows", lambda rows, columns, **_: tables.append(rows) or "")
    base = ("data=text", f"data.text={text}", "data.stages=[{steps: 3, row_tokens: 64, doc_tokens: 32}]")
    plan.run(composed("plan", "method=longspec", *base, "trainer.accelerator=cuda"))
    assert tables[-1][0]["hours"] > 0 and "written first" not in capsys.readouterr().out
    answers = ("data.prompt_tokens=[8,16]", "data.answers=target")
    plan.run(composed("plan", "method=longspec", *base, *answers, "trainer.accelerator=cpu"))
    assert [tables[-1][0][key] for key in ("hours", "step_s", "tokens_per_s")] == [None] * 3
    said = capsys.readouterr().out
    assert "No times" in said and "TFLOP/s" not in said and "written first, by prepare" in said
