"""Suites of `longtrain bench` from their configuration to what they write, and what `eval` measures."""

from __future__ import annotations

import json

import pytest

from longtrain.jobs import bench


def written(tmp_path, name):
    return json.loads((tmp_path / "runs" / "one" / "bench" / f"{name}.json").read_text())["rows"]


def test_random_weights_and_a_random_draft(composed, tmp_path, capsys):
    small = ("suite.shape=llama_micro", "lengths=[24]", "suite.batches=[1,2]", "suite.max_new_tokens=5")
    quick = ("suite.repeats=1", "suite.warmup=0", "suite.cycles=2", "suite.baselines=[hugging_face]")
    bench.run(composed("bench", "method=longspec", "method.window=8", *small, *quick))
    rows = written(tmp_path, "engine")
    assert [(row["prompt_tokens"], row["batch"]) for row in rows] == [(24, 1), (24, 2)]
    assert all(row["same"] == 1.0 and row["hugging_face"]["prefill_s"]["median"] > 0 for row in rows)
    assert [one["shape"] for one in rows[0]["steps"]] == [[], [1, 1, 1, 1]]
    said = capsys.readouterr().out
    assert "| plain tok/s |" in said and "| attention ms |" in said and "wrote " in said


def test_real_text_without_a_draft(composed, tmp_path):
    bench.run(composed("bench", "lengths=[40]", "suite.max_new_tokens=4", "suite.repeats=1"))
    (row,) = written(tmp_path, "engine")
    assert row["plain"]["target_forwards"] == 4 and "draft" not in row and "steps" not in row


def results(tmp_path, suite):
    return json.loads((tmp_path / "runs" / "one" / "eval" / suite / "results.json").read_text())


def test_a_real_target_without_a_shape_is_measured_by_eval(composed, tmp_path):
    """Keys of the bench suite go before those under `suite.eval`."""
    few = ("suite.prompts=2", "suite.max_new_tokens=6", "suite.drafted=[2]", "lengths=[64]")
    bench.run(composed("bench", "suite=quantspec", "suite.systems=[prompt_lookup]", *few))
    found = results(tmp_path, "acceptance")
    drafted = [one for one in found["systems"] if one["facts"].get("shape")]
    assert [one["facts"]["shape"] for one in drafted] == [[1, 1]]
    assert [task["task"] for task in drafted[0]["tasks"]] == ["64"]
    assert drafted[0]["tasks"][0]["acceptance"]["by_depth"][0]["tried"] > 0
    assert not (tmp_path / "runs" / "one" / "bench" / "quantspec.json").exists()


ROWS = ("target.path=tiny", "lengths=[128]", "suite.row_counts=[1,3]")


def check_rows(rows):
    assert [(row["cache"], row["rows"]) for row in rows] == [
        (cache, count) for cache in ("quantised", "plain") for count in (1, 3)
    ]
    assert {row["context_tokens"] for row in rows} == {129} and {row["section"] for row in rows} == {"rows"}
    assert all(row["logits_equal"] for row in rows if row["rows"] == 1)
    assert all(row["same_argmax"] == 1.0 for row in rows)


def test_rows_of_a_step_beside_single_rows(composed, tmp_path, capsys):
    bench.run(composed("bench", "suite=rows", *ROWS))
    check_rows(written(tmp_path, "rows"))
    assert "| quantised | 129 | 3 |" in capsys.readouterr().out


def test_the_roofline_is_a_table(composed, tmp_path, capsys):
    keys = ("lengths=[1k,128k]", "suite.batches=[1]", "suite.kv_bits=4")
    bench.run(composed("bench", "suite=roofline", *keys))
    rows = written(tmp_path, "roofline")
    found = {(row["phase"], row["context"]): row for row in rows}
    content = json.loads((tmp_path / "runs" / "one" / "bench" / "roofline.json").read_text())
    assert content["settings"]["kv_bits"] == 4 and content["versions"]["torch"] and "argv" in content
    assert "gpus" in content["machine"]
    assert found["decode", 131072]["kv_gb"] == pytest.approx(17.2 / 3.76, rel=0.01)
    assert found["decode", 1024]["attention_share"] < 0.02 < 0.2 < found["decode", 131072]["attention_share"]
    said = capsys.readouterr().out
    assert (
        "| attention's share |" in said
        and "llama31_8b on H200" in said
        and "wrote roofline.json, roofline.md in " in said
    )
