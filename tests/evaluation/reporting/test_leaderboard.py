"""One page of many evaluations: groups that may be compared, their rows, and what sets groups apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.reporting.leaderboard import leaderboard, load, page_text
from longtrain.evaluation.reporting.page import board_page


def provenance(
    folder, *, commit="a" * 40, gpus=("H200",), argv=("longtrain", "--config-name=eval", "home=/home/me/x")
):
    made = {
        "argv": list(argv),
        "git": {"commit": commit, "dirty": False},
        "time_utc": "2026-01-02T03:04:05+00:00",
    }
    made["machine"] = {"gpus": list(gpus)}
    (folder / "eval" / "longbench" / "provenance.json").write_text(json.dumps(made))
    return folder


def test_rows_of_one_group_are_ranked_and_a_system_that_ran_twice_is_one_row(write, made):
    lower = lambda record: replace(record, score=0.5 * record.score)  # noqa: E731
    first, again = (provenance(write(name)) for name in ("first", "again"))
    worse = provenance(write("worse", lower, systems=made.systems[:2]), commit="b" * 40, gpus=["A100"])
    found = leaderboard(load([first, again, worse]))
    (group,) = found["groups"]
    at = {name: group["header"].index(name) for name in ("system", "run", "score")}
    rows = [(row[at["system"]], row[at["run"]]) for row in group["rows"]]
    assert len(rows) == 5 and ("full", "first/longbench, again/longbench") in rows
    assert ("full", "worse/longbench") in rows
    scores = [float(row[at["score"]].split()[0]) for row in group["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert all(re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", row[at["score"]]) for row in group["rows"])
    assert {"at 1k", "at 8k"} <= set(group["header"])
    assert (
        f"measured with other commits ({'a' * 12}, {'b' * 12}): small differences may be the code's"
        in (group["notes"])
    )
    text = page_text(found)
    assert "```sh\nlongtrain eval home=x\n```" in text and "/home/me" not in text
    assert f"**again/longbench** {'a' * 12}, H200, 2026-01-02T03:04" in text


def test_groups_say_what_sets_them_apart(write):
    one = provenance(write("one"))
    other = provenance(write("other", weights_hash="another", dtype="float32"), commit="b" * 40)
    data = provenance(write("data", protocol="bb", settings={"tasks": {"qasper": {"template": "y"}}}))
    found = leaderboard(load([one, other, data]))
    assert len(found["groups"]) == 3 and len(found["apart"]) == 3
    said = " / ".join("; ".join(pair["because"]) for pair in found["apart"])
    assert "other targets (" in said and "other precision (" in said
    assert 'other data, prompts or decoding: tasks.qasper.template is "' in said
    assert f"other commits ({'a' * 12} and {'b' * 12})" in said
    assert "## What may not be compared" in page_text(found)


def test_the_page_is_whole_and_holds_no_markup_from_outside(write):
    folder = provenance(write("one"), argv=["longtrain", "</script><script>alert(1)</script>"])
    html = board_page(leaderboard(load([folder]))).decode()
    assert "alert(1)</script>" not in html and '"data">{' in html
    assert not re.findall(r"(?:src|href)=\"https?:", html)


def test_it_takes_runs_results_and_folders_of_runs(write, tmp_path, run):
    one, two = write("one"), write("two")
    everything = [one.parent, one, two / "eval" / "longbench"]
    assert [one.label for one in load(everything)] == ["one/longbench", "two/longbench"]
    done = run("leaderboard", str(one), str(two))
    assert done.returncode == 0, done.stderr
    written = tmp_path / "runs" / "run" / "leaderboard"
    assert {file.name for file in written.iterdir()} == {
        f"leaderboard.{end}" for end in ("md", "html", "json")
    }
    assert "leaderboard.html: " in done.stdout and "one/longbench, two/longbench" in done.stdout


def test_what_is_no_evaluation(write, tmp_path, run):
    with pytest.raises(ConfigError, match=r"has no results\.json; pass folders of finished evaluations"):
        load([tmp_path])
    broken = write("broken")
    (broken / "eval" / "longbench" / "results.json").write_text("{}")
    with pytest.raises(DataError, match=r"results\.json cannot be read: it lacks suite; run the suite again"):
        load([broken])
    for file, key, value in (
        ("results", "notes", None),
        ("results", "suite", float("nan")),
        ("provenance", "git", 3),
    ):
        path = provenance(write(f"odd_{key}")) / "eval" / "longbench" / f"{file}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        with pytest.raises(DataError, match=r"longbench holds other values than eval writes \("):
            load([path.parent])
    for words, says in (((), "nothing to list; pass runs"), (("nowhere",), "there is no run nowhere")):
        done = run("leaderboard", *words)
        assert done.returncode == 1 and says in done.stderr and len(done.stderr.splitlines()) == 1
