"""`longtrain eval suite=eviction` from its configuration to its files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.evaluation.eviction_policies import contenders
from longtrain.evaluation.eviction_protocol import Protocol
from longtrain.jobs import eval as evaluation
from longtrain.jobs.eval_eviction import budgets_of, protocol_of
from longtrain.methods.longspec.config import Config
from longtrain.methods.lookaheadkv.config import Config as LookaheadConfig
from longtrain.targets.loading import load_target

SMALL = (
    "suite=eviction_quick",
    "lengths=[440,600]",
    "suite.budgets=[32,64]",
    "suite.prompts=2",
    "suite.tasks=[needles,table]",
    "suite.max_new_tokens=3",
    "suite.bootstrap=20",
    "suite.rank_prompts=1",
    "suite.time_prompts=1",
)

SHORT = Protocol((440,), (Budget(tokens=32),), prompts=1)


@pytest.fixture
def run(composed, text):
    (text / "book_one.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 60)

    def go(*overrides):
        evaluation.run(composed("eval", *SMALL, f"suite.text={text}", *overrides))

    return go


def test_files_and_a_second_run_that_adds_a_policy(run, tmp_path, capsys) -> None:
    run()
    folder = tmp_path / "runs" / "one" / "eval"
    names = {"scores.json", "timings.json", "table.md", "accuracy.png", "overhead.png", "pieces"}
    assert {path.name for path in folder.iterdir()} == names | {"config.yaml", "provenance.json"}
    scores = json.loads((folder / "scores.json").read_text())
    assert [p["name"] for p in scores["policies"]] == ["full", "oracle", "streaming_llm", "snapkv"]
    assert [c["length"] for c in scores["policies"][0]["lengths"]] == scores["lengths"] == [440, 600]
    assert "snapkv" in capsys.readouterr().out
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "pieces").iterdir()}
    run("suite.policies=[streaming_llm,snapkv,{name:adakv,over:snapkv}]")
    assert len(list((folder / "pieces").iterdir())) == len(stamps) + 2
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    again = json.loads((folder / "scores.json").read_text())
    assert again["policies"][:4] == scores["policies"] and again["policies"][4]["name"] == "adakv(snapkv)"
    with pytest.raises(ConfigError, match=r"seed=0, and seed=1 is asked for; pass name=OTHER"):
        run("seed=1")


def test_shares_of_the_prompt_and_a_question_after_eviction(run, tmp_path) -> None:
    run("suite.budgets=[0.1,0.25]", "suite.question=after", "lengths=[600]", "suite.time_prompts=0")
    folder = tmp_path / "runs" / "one" / "eval"
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["budgets"] == ["10%", "25%"] and scores["question"] == "after"
    assert not (folder / "overhead.png").exists()
    report = (folder / "table.md").read_text()
    assert "| budget 10% | budget 25% |" in report and "those of the answer's rows alone" in report
    cell = scores["policies"][3]["lengths"][0]["budgets"][1]
    assert cell["kept_share"] == pytest.approx(0.25, abs=0.01)


def test_no_policies_leaves_the_bounds(run, tmp_path) -> None:
    run("suite.policies=null", "lengths=[440]", "suite.time_prompts=0", "suite.rank_prompts=0")
    scores = json.loads((tmp_path / "runs" / "one" / "eval" / "scores.json").read_text())
    assert [policy["name"] for policy in scores["policies"]] == ["full", "oracle"]


def test_an_artifact_that_evicts_nothing(run, tmp_path, target_folder, trained) -> None:
    made = Artifact.from_module(
        "longspec", Config(window=16), module=trained, target=load_target(target_folder)
    )
    made.save(tmp_path / "checkpoints" / "draft")
    with pytest.raises(ConfigError, match=r"artifact draft \(longspec\) brings no evictor"):
        run("artifact=draft")


def test_artifacts_beside_their_baselines(run, tmp_path, target_folder) -> None:
    target = load_target(target_folder)
    config = LookaheadConfig(n_lookahead=4, lora_rank=2)
    module = methods.get("lookaheadkv").build(config, target.info)
    made = Artifact.from_module("lookaheadkv", config, module=module, target=target)
    made.save(tmp_path / "checkpoints" / "mine")
    run("artifact=mine", "suite.policies=[snapkv,{artifact:mine,adaptive:heads}]", "lengths=[440]")
    scores = json.loads((tmp_path / "runs" / "one" / "eval" / "scores.json").read_text())
    names = [policy["name"] for policy in scores["policies"]]
    assert names == ["full", "oracle", "mine", "snapkv", "mine adaptive=heads"]
    found = {policy["name"]: policy["lengths"][0] for policy in scores["policies"]}
    assert [row["kept_rows"] for row in found["mine"]["budgets"]] == [32, 64]
    assert found["mine"]["ranks"] == found["mine adaptive=heads"]["ranks"]  # the same scores, other budgets
    pairs = {(gap["first"], gap["second"]) for gap in scores["differences"]}
    assert pairs == {("mine", "snapkv"), ("mine adaptive=heads", "snapkv")}
    with pytest.raises(ConfigError, match=r"budget_tokens=16; every policy .* pass suite\.budgets="):
        run("suite.policies=[{artifact:mine,budget_tokens:16}]", "lengths=[440]")
    other = load_target(target_folder)
    other.info = replace(other.info, weights_hash="0" * 64)
    artifact = Artifact.load("mine", home=tmp_path)
    with pytest.raises(TargetMismatchError):
        contenders(other, [{"artifact": "mine"}], SHORT, load=lambda where: artifact)


def test_budgets_as_they_are_typed() -> None:
    assert [b.tokens for b in budgets_of([64, 32, 64])] == [32, 64]
    assert [b.ratio for b in budgets_of([0.5, 0.1])] == [0.1, 0.5]
    for wrong in ([0], [64, 0.5], [], 64, ["64"], [1.5], [True], [None, 2]):
        with pytest.raises(ConfigError, match=r"suite\.budgets="):
            budgets_of(wrong)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("suite.question=before", "allowed: prompt, after"),
        ("suite.prompts=many", "suite.prompts=many; allowed: a whole number"),
        ("lengths=[]", "measures nothing"),
        ("suite.tasks=needles", "suite.tasks"),
    ],
)
def test_wrong_values(composed, override, message) -> None:
    with pytest.raises(ConfigError, match=message):
        protocol_of(composed("eval", "suite=eviction", override))
