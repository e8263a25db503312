"""`longtrain bench suite=engine` from its configuration to what it writes."""

from __future__ import annotations

import json

from longtrain.jobs import bench


def written(tmp_path, name):
    return json.loads((tmp_path / "runs" / "one" / "bench" / f"{name}.json").read_text())["rows"]


def test_random_weights_and_a_random_draft(composed, tmp_path, capsys):
    small = ("suite.shape=llama_micro", "lengths=[24]", "suite.batches=[1,2]", "suite.max_new_tokens=5")
    quick = ("suite.repeats=1", "suite.warmup=0", "suite.baselines=[hugging_face]")
    bench.run(composed("bench", "method=longspec", "method.window=8", *small, *quick))
    rows = written(tmp_path, "engine")
    assert [(row["prompt_tokens"], row["batch"]) for row in rows] == [(24, 1), (24, 2)]
    assert all(row["same"] == 1.0 and row["hugging_face"]["prefill_s"]["median"] > 0 for row in rows)
    said = capsys.readouterr().out
    assert "| plain tok/s |" in said and "wrote " in said


def test_real_text_without_a_draft(composed, tmp_path):
    bench.run(composed("bench", "lengths=[40]", "suite.max_new_tokens=4", "suite.repeats=1"))
    (row,) = written(tmp_path, "engine")
    assert row["plain"]["target_forwards"] == 4 and "draft" not in row
