"""`longtrain demo`: what it shows, and that its artifacts ship with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.check import at
from longtrain.artifact import Artifact
from longtrain.artifact.evidence import Evidence
from longtrain.artifact.inspection import inspect
from longtrain.assets import asset_dir, bundled_artifacts
from longtrain.targets.loading import load_target

MOST_BYTES = 4_000_000


@pytest.fixture(scope="module")
def tiny():
    return load_target("tiny")


def test_bundled_artifacts_are_small_and_say_where_they_are_from():
    found = bundled_artifacts()
    assert set(found) == {"tiny_longspec", "tiny_lookaheadkv"}
    files = [file for folder in found.values() for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    for folder in found.values():
        about = json.loads((folder / "longtrain.json").read_text())["provenance"]
        assert (
            about["license"] == "apache-2.0"
            and f"name={folder.name}" in about["argv"]
            and about["data"]["sources"]
        )
        assert "/tmp" not in (folder / "longtrain.json").read_text() + (folder / "README.md").read_text()


def test_the_page_of_bundled_artifacts_says_what_their_cards_say():
    found = bundled_artifacts()
    page = (found["tiny_longspec"].parent / "README.md").read_text()
    rows = {row[0]: row[1] for row in Evidence.of_folder(found["tiny_longspec"]).results[0].rows}
    for system in ("tiny_longspec chain 4", "tiny_longspec tree 4-8-8-8"):
        assert f"τ {rows[system]} |" in page
    rows = {row[0]: row[1][:4] for row in Evidence.of_folder(found["tiny_lookaheadkv"]).results[0].rows}
    for name in ("tiny_lookaheadkv", "snapkv", "oracle"):
        assert f"| {', '.join(rows[f'{name}@{budget}'] for budget in (32, 64, 128))} |" in page


@pytest.mark.parametrize("name", ["tiny_longspec", "tiny_lookaheadkv"])
def test_bundled_artifacts_load_by_name_and_verify(name, tiny, tmp_path):
    artifact = Artifact.load(name, home=tmp_path)
    assert artifact.golden is not None
    artifact.build(tiny)
    shown = inspect(name, home=tmp_path)
    assert not shown.fault and shown.results, shown.fault


def test_the_demo_says_the_same_twice_and_answers_from_64_entries(run):
    done = run("demo")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "\x1b" not in done.stdout  # no terminal: brackets, no colour
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    assert "The two texts are the same" in done.stdout
    beside = done.stdout.partition("speculative decoding")[2].partition("plain:")[0]
    assert "[" in beside and "[1937204.]" not in beside
    tau = float(done.stdout.partition("acceptance length τ ")[2].partition(")")[0])
    assert tau > 1.3
    kept = done.stdout.partition("KV entries a head")[2].partition("== What follows")[0]
    assert "[" in kept and "mother so last week" in kept
    follows, _, published = done.stdout.partition("== What follows")[2].partition("== Measured on")
    lines = follows.strip().splitlines()[1:]
    texts = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)
    assert texts["64 entries, lookaheadkv"] == texts["whole cache"] != texts["64 entries, snapkv"]
    assert "1937204" in texts["whole cache"]
    assert "4.65 times as fast" in published


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        (
            "qwen25_coder_05b/eagle3_speculation_mixed",
            {
                "4.65": "speed_pooled[system=joined tree 4-8-8-8].speed",
                "1.49": "speed_pooled[system=joined tree 4-8-8-8].lowest_task",
                "6.45": "speed_pooled[system=joined tree 4-8-8-8].highest_task",
                "4.43": "speed_pooled[system=auto].speed",
                "1.50": "speed_pooled[system=auto].lowest_task",
                "6.24": "speed_pooled[system=auto].highest_task",
            },
        ),
        (
            "qwen25_coder_15b/eagle3_speculation_muon",
            {
                "2.54": "speed_pooled[system=joined tree 4-8-8-8].speed",
                "1.59": "speed_pooled[system=joined tree 4-8-8-8].lowest_task",
                "3.12": "speed_pooled[system=joined tree 4-8-8-8].highest_task",
                "2.84": "speed_pooled[system=auto].speed",
                "1.65": "speed_pooled[system=auto].lowest_task",
                "4.89": "speed_pooled[system=auto].highest_task",
            },
        ),
        (
            "qwen25_coder_15b/lookaheadkv_needles",
            {
                "95%": "systems[name=lkv15@256].average.value",
                "59%": "systems[name=snapkv@256].average.value",
                "97%": "systems[name=full].average.value",
            },
        ),
        (
            "qwen25_coder_15b/specontext_longbench",
            {"41.7": "systems[name=sc15@1024].average.value", "41.8": "systems[name=full].average.value"},
        ),
    ],
)
def test_published_figures_of_the_demo_are_those_of_the_results(file, shown):
    results = Path(__file__).parents[2] / "recipes/results/published" / f"{file}.json"
    measured = json.loads(results.read_text())
    lines = " ".join(json.loads((asset_dir("bundled") / "demo.json").read_text())["published"])
    for number, place in shown.items():
        assert number in lines
        digits = len(number.rstrip("%").partition(".")[2])
        assert f"{at(measured, place):.{digits}f}" == number.rstrip("%")


def test_without_an_artifact_that_drafts_there_is_no_demo(run):
    done = run("demo", "artifact=tiny_lookaheadkv")
    assert done.returncode == 1 and "an artifact that drafts" in done.stderr
    done = run("demo", "artifact=nothing")
    assert done.returncode == 1 and "tiny_longspec, tiny_lookaheadkv" in done.stderr
