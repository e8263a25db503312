from __future__ import annotations

import json
import shutil

import pytest
from omegaconf import OmegaConf

from longtrain.artifact import Artifact
from longtrain.decoding.roles import Law
from longtrain.errors import ArtifactError, ConfigError, DataError, LongtrainError, TargetMismatchError
from longtrain.jobs import eval as evaluation
from longtrain.jobs import eval_acceptance
from longtrain.jobs.setup import shape_from
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.loading import load_target, random_target

SMALL = (
    "suite=smoke",
    "lengths=[64,128]",
    "suite.prompts=4",
    "suite.max_new_tokens=12",
    "suite.bootstrap=50",
)


@pytest.fixture
def artifact(tmp_path, target_folder, trained):
    target = load_target(target_folder)
    made = Artifact.from_module("longspec", Config(window=16), module=trained, target=target)
    return made.save(tmp_path / "checkpoints" / "draft")


@pytest.fixture
def run(composed, artifact, text):
    def go(*overrides):
        evaluation.run(composed("eval", *SMALL, "artifact=draft", f"suite.text={text}", *overrides))

    return go


def test_acceptance_leaves_scores_table_picture_and_provenance(run, tmp_path):
    run()
    folder = tmp_path / "runs" / "one" / "eval"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "scores.json",
        "timings.json",
        "table.md",
        "acceptance.png",
        "acceptance",  # the harness's own: what is done, results.json, tables, pages
        "config.yaml",
        "provenance.json",
    }
    results = json.loads((folder / "acceptance" / "results.json").read_text())
    assert [task["task"] for task in results["systems"][1]["tasks"]] == ["64", "128"]
    scores = json.loads((folder / "scores.json").read_text())
    cells = scores["variants"][0]["lengths"]
    assert [cell["length"] for cell in cells] == [64, 128]
    assert all(cell["exactness"]["different"] == 0 and cell["prompts"] == 4 for cell in cells)
    assert scores["kinds"] == {"book": 2, "code": 2} and scores["variants"][0]["name"] == "draft"
    timings = json.loads((folder / "timings.json").read_text())
    assert timings["speed"][0]["figures"]["draft"]["ratio"] > 0
    assert "| draft | 64 | 4 |" in (folder / "table.md").read_text()
    assert (folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_scores_do_not_change_on_a_rerun(run, tmp_path):
    path = tmp_path / "runs" / "one" / "eval" / "scores.json"
    run("suite.speed_prompts=0")
    before = path.read_bytes()
    run("suite.speed_prompts=0")
    assert path.read_bytes() == before


def test_a_run_that_was_cut_off_goes_on(run, tmp_path, monkeypatch):
    from longtrain.evaluation.harness import answers as harness

    folder = tmp_path / "runs" / "one" / "eval"
    run("suite.speed_prompts=0")
    before = (folder / "scores.json").read_bytes()
    (folder / "scores.json").unlink()
    ledger = next(folder.glob("acceptance/*/ledger/draft-*.jsonl"))
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])  # killed while the last unit was written
    decoded = []
    decode = harness.Runner._decode

    def counted(self, system, task, unit, prompts):
        decoded.append((system.name, task.name, len(prompts)))
        return decode(self, system, task, unit, prompts)

    monkeypatch.setattr(harness.Runner, "_decode", counted)
    run("suite.speed_prompts=0")
    assert (folder / "scores.json").read_bytes() == before and decoded == [("draft", "128", 4)]
    run("suite.speed_prompts=0", "suite.max_new_tokens=10")  # other settings start anew
    assert len(decoded) == 1 + 4


def test_parts_give_what_one_run_gives(run, tmp_path):
    path = tmp_path / "runs" / "one" / "eval" / "scores.json"
    run("suite.speed_prompts=0", "suite.batch=2")
    before = path.read_bytes()
    shutil.rmtree(path.parent)
    run("suite.speed_prompts=0", "suite.batch=2", "shards=2", "shard=1")
    assert not path.exists()
    run("suite.speed_prompts=0", "suite.batch=2", "shards=2", "shard=0")
    assert path.read_bytes() == before


def test_without_plain_decoding_only_drafts_run(run, tmp_path):
    run("suite.baseline=false", "suite.speed_prompts=0")
    scores = json.loads((tmp_path / "runs" / "one" / "eval" / "scores.json").read_text())
    assert scores["plain"] == [] and scores["variants"][0]["lengths"][0]["exactness"] is None


def test_several_artifacts_and_shapes_side_by_side(run, artifact, tmp_path):
    other = Artifact.load(artifact)
    other.save(tmp_path / "checkpoints" / "twin")
    run("artifact=[draft,twin]", "suite.shapes=[[1,1,1],[2,2,2]]", "suite.attention_mass=true")
    scores = json.loads((tmp_path / "runs" / "one" / "eval" / "scores.json").read_text())
    names = [variant["name"] for variant in scores["variants"]]
    assert names == ["draft chain 3", "draft tree 2-2-2", "twin chain 3", "twin tree 2-2-2"]
    by_second = {(d["second"], d["length"]): d["tau"]["value"] for d in scores["differences"]}
    assert by_second[("twin chain 3", 64)] == 0.0 and len(by_second) == 6
    assert [mass["window"] for mass in scores["attention_mass"]] == [16, 16]


def test_sampling_is_measured_too(run, tmp_path):
    run("decode.temperature=1.0", "decode.law=iid", "suite.speed_prompts=0")
    scores = json.loads((tmp_path / "runs" / "one" / "eval" / "scores.json").read_text())
    assert scores["temperature"] == 1.0 and scores["variants"][0]["law"] == "iid"
    assert scores["variants"][0]["lengths"][0]["exactness"] is None


def test_wrong_output_fails_after_the_scores_are_written(run, tmp_path, monkeypatch):
    """A draft that damages the target's cache is the fault that the comparison is there for."""
    observe = LongSpecRuntime.observe

    def damage(self, tree, verdict, step):
        observe(self, tree, verdict, step)
        if len(verdict.n_B) > 1:  # the golden outputs, asked one prompt at a time, would notice it first
            for tensor in (self.cache.k_LBGSD, self.cache.v_LBGSD):
                tensor.mul_(-1)

    monkeypatch.setattr(LongSpecRuntime, "observe", damage)
    with pytest.raises(LongtrainError, match=r"differs from decoding without the draft in \d of 4"):
        run()
    assert (tmp_path / "runs" / "one" / "eval" / "scores.json").is_file()


def test_a_draft_over_an_evictor_is_measured_and_compared_with_its_own_cache(run, tmp_path):
    systems = "suite.systems=[snapkv,{artifact:draft,policy:snapkv}]"
    run(systems, "suite.budgets=[48]", "suite.speed_prompts=1")
    folder = tmp_path / "runs" / "one" / "eval"
    scores = json.loads((folder / "scores.json").read_text())
    cells = {one["name"]: one["lengths"] for one in scores["variants"]}
    assert list(cells) == ["draft", "draft+snapkv@48"]
    assert cells["draft"][0]["exactness"]["different"] == 0
    assert cells["draft+snapkv@48"][0]["exactness"] is None  # its texts are not those of the full cache
    assert [cell["length"] for cell in scores["plain"]] == [64, 128]
    results = json.loads((folder / "acceptance" / "results.json").read_text())
    assert "snapkv@48 has no draft: its acceptance length says nothing here" in results["notes"]
    found = {system["name"]: system["tasks"][0]["exactness"] for system in results["systems"]}
    assert found["snapkv@48"] is None and found["draft+snapkv@48"]["compared"] == 4


def test_a_method_without_training_needs_no_artifact(run, tmp_path):
    run(
        "artifact=null",
        "method=quantspec",
        "target.path=tiny",
        "lengths=[128]",
        "suite.speed_prompts=0",
    )
    scores = json.loads((tmp_path / "runs" / "one" / "eval" / "scores.json").read_text())
    assert [one["name"] for one in scores["variants"]] == ["quantspec"]


def test_evictors_alone_are_sent_to_suites_that_measure_them(run):
    with pytest.raises(ConfigError, match=r"snapkv@128 brings no draft.*artifact: \[DRAFT, EVICTOR\].*ruler"):
        run("artifact=null", "suite.systems=[snapkv]")


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("artifact=none", ArtifactError, "no artifact 'none'"),
        ("artifact=null", ConfigError, r"artifact=checkpoints/mine\), or method=quantspec, which needs no"),
        (
            "suite.budgets=[32,0.3]",
            ConfigError,
            r"tokens or shares of the prompt, not both .*budgets=\[32\], then",
        ),
        ("target.path=/no/where", ConfigError, "/no/where is not a folder"),
        ("lengths=[4k]", DataError, "pass shorter lengths or longer text"),
        ("lengths=[]", ConfigError, r"lengths=\[\] measures nothing"),
        ("lengths=[two]", ConfigError, "length 'two' is no token count"),
        ("suite.prompts=0", ConfigError, r"suite.prompts=0; allowed: 1 or more"),
        ("suite.shapes=[[0,1]]", ConfigError, r"shape \[0, 1\] drafts nothing"),
        ("suite.shapes=4", ConfigError, r"suite.shapes=4; allowed: a list"),
        ("decode.temperature=hot", ConfigError, "decode.temperature=hot; allowed: a number"),
        ("decode.law=luck", ConfigError, "decode.law=luck; allowed: auto, point, iid"),
        ("suite.text=/no/text", DataError, "no held-out text at /no/text"),
        ("suite.text=data", ConfigError, "suite.text=data needs data=NAME"),
        ("suite.kinds=[chat]", DataError, "kinds there: book, code"),
        ("suite.name=speed", ConfigError, "no suite 'speed'; known: acceptance, aime24"),
    ],
)
def test_bad_input_is_one_clear_error_and_writes_nothing(run, tmp_path, override, error, message):
    with pytest.raises(error, match=message):
        run(override)
    assert not (tmp_path / "runs" / "one" / "eval").exists()


def test_artifact_for_another_target(run, tmp_path):
    other = random_target("qwen3_micro")
    from longtrain import methods

    module = methods.get("longspec").build(Config(window=16), other.info)
    made = Artifact.from_module("longspec", Config(window=16), module=module, target=other)
    made.save(tmp_path / "checkpoints" / "stranger")
    with pytest.raises(TargetMismatchError, match="artifact was trained for qwen3_micro"):
        run("artifact=stranger")


def test_suite_keys_are_all_read(composed):
    """A key in the suite's file that the job does not know would be a promise it does not keep."""
    from pathlib import Path

    source = Path(eval_acceptance.__file__).read_text()
    for key in OmegaConf.to_container(composed("eval", "suite=acceptance").suite):
        assert f"suite.{key}" in source or f'"{key}"' in source, key


def test_law_auto_samples_chains_where_decoding_samples() -> None:
    def law(temperature: float, widths: list[int], name: str = "auto") -> Law:
        decode = {"shape": widths, "law": name, "temperature": temperature}
        return shape_from(OmegaConf.create({"decode": decode})).law

    assert law(0.0, [1, 1]) is Law.POINT
    assert law(1.0, [1, 1]) is Law.IID
    assert law(1.0, [2, 2]) is Law.POINT
    assert law(1.0, [1, 1], "point") is Law.POINT
    with pytest.raises(ConfigError, match="this job wants one for all"):
        law(0.0, "auto")
