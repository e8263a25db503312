from __future__ import annotations

import json

import pytest

from longtrain.artifact import Artifact
from longtrain.artifact.evidence import Evidence
from longtrain.config import RunConfig
from longtrain.decoding.roles import ChildChoice
from longtrain.errors import ArtifactError, ConfigError, DataError, LongtrainError, TargetMismatchError
from longtrain.jobs import eval as evaluation
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.loading import random_target

FOLDER = "runs/one/eval/acceptance"
SMALL = (
    "suite=smoke",
    "lengths=[64,128]",
    "suite.prompts=4",
    "suite.max_new_tokens=12",
    "suite.bootstrap=50",
)


@pytest.fixture
def run(composed, artifact, text):
    def go(*overrides):
        evaluation.run(composed("eval", *SMALL, "artifact=draft", f"suite.text={text}", *overrides))

    return go


@pytest.fixture
def results(tmp_path):
    """`results()`: what the run left."""
    return lambda: json.loads((tmp_path / FOLDER / "results.json").read_text())


def test_acceptance_leaves_results_tables_pictures_and_provenance(run, tmp_path, results, drawn):
    run()
    names = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert {
        "results.json",
        "examples.jsonl",
        "timings.json",
        "table.md",
        "speed.md",
        "acceptance.png",
    } < names
    assert {"config.yaml", "provenance.json", "journals"} < names
    found = results()
    full, draft = found["systems"]
    assert [task["task"] for task in draft["tasks"]] == ["64", "128"]
    for one, plain in zip(draft["tasks"], full["tasks"], strict=True):
        assert one["exactness"]["different"] == 0 and one["acceptance"]["tau"]["n"] == 4
        assert one["metrics"]["draft"]["value"] > 0 and one["metrics"]["cache"]["value"] > 0
        assert one["metrics"]["repeated"] == plain["metrics"]["repeated"]
    assert draft["facts"]["children"] == "point" and draft["extra"]["documents"] == 2
    short, long = (task["acceptance"]["tau"]["value"] for task in draft["tasks"])
    assert draft["extra"]["retention"] == pytest.approx((long - 1) / (short - 1))
    kinds = {cell["facets"]["kind"]: cell["acceptance"]["n"] for cell in found["cells"] if cell["acceptance"]}
    assert kinds == {"book": 2, "code": 2}
    timings = json.loads((tmp_path / FOLDER / "timings.json").read_text())
    assert timings["speed"][0]["metrics"]["draft"]["ratio"] > 0
    assert "τ, not repetitive" in (tmp_path / FOLDER / "table.md").read_text()
    assert (tmp_path / FOLDER / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_the_card_of_an_artifact_has_what_was_measured(run, artifact, tmp_path, capsys):
    assert "was not evaluated" in (artifact / "README.md").read_text()
    run()
    assert "speed over plain decoding" in capsys.readouterr().out
    table = (tmp_path / FOLDER / "table.md").read_text()
    assert "The system full is plain decoding on the whole cache." in table
    assert "ratios to full (plain decoding);" in (tmp_path / FOLDER / "speed.md").read_text()
    card = (artifact / "README.md").read_text()
    assert "was not evaluated" not in card and "suite=acceptance" in card and "draft" in card
    assert (
        len(Evidence.of_folder(artifact).results) == 1 and (artifact / "acceptance-acceptance.png").is_file()
    )
    run("run_dir=" + str(tmp_path / "runs/two"), "suite.prompts=3")  # another run adds to it
    assert len(Evidence.of_folder(artifact).results) == 2
    run("run_dir=" + str(tmp_path / "runs/two"), "suite.prompts=3")  # the same again does not
    assert len(Evidence.of_folder(artifact).results) == 2
    assert Artifact.load(artifact).method == "longspec"


def test_an_artifact_is_loaded_once(run, monkeypatch):
    load, names = Artifact.load, []
    monkeypatch.setattr(Artifact, "load", lambda where, **keys: names.append(where) or load(where, **keys))
    run("suite.speed_prompts=0")
    assert names == ["draft"]


def test_the_card_behind_a_link_is_written_anew_too(run, artifact, tmp_path):
    artifact.rename(tmp_path / "big")
    artifact.symlink_to(tmp_path / "big")
    run()
    assert artifact.is_symlink() and "was not evaluated" not in (tmp_path / "big" / "README.md").read_text()


def test_without_plain_decoding_only_drafts_run(run, results):
    run("suite.baseline=false", "suite.speed_prompts=0")
    (draft,) = results()["systems"]
    assert draft["name"] == "draft" and draft["tasks"][0]["exactness"] is None


def test_several_artifacts_and_shapes_side_by_side(run, artifact, tmp_path, results):
    other = Artifact.load(artifact)
    other.save(tmp_path / "checkpoints" / "twin")
    shapes = "suite.shapes=[[1,1,1],[2,2,2]]"
    run("artifact=[draft,twin]", shapes, "suite.attention_mass=true", "suite.speed_prompts=0")
    found = results()
    names = [system["name"] for system in found["systems"][1:]]
    assert names == ["draft chain 3", "draft tree 2-2-2", "twin chain 3", "twin tree 2-2-2"]
    gaps = {(one["second"], one["task"]): one["score"]["difference"]["value"] for one in found["differences"]}
    assert gaps[("twin chain 3", "64")] == 0.0
    assert {second for second, _ in gaps} == set(names[1:]) and all(
        one["first"] == names[0] for one in found["differences"]
    )
    outside = found["systems"][1]["tasks"][-1]
    assert (
        outside["task"] == "attention" and 0 < outside["metrics"]["attention outside the window"]["value"] < 1
    )
    assert not any("attention outside the window" in task["metrics"] for task in found["systems"][0]["tasks"])


def test_sampling_is_measured_too(run, results):
    run("decode.temperature=1.0", "decode.children=iid", "suite.speed_prompts=0")
    found = results()
    assert found["protocol"]["settings"]["decoding"]["temperature"] == 1.0
    assert found["systems"][1]["facts"]["children"] == "iid"
    assert found["systems"][1]["tasks"][0]["exactness"] is None


def test_wrong_output_fails_after_the_scores_are_written(run, tmp_path, monkeypatch):
    """A draft that damages the target's cache is the fault that the comparison is there for."""
    observe = LongSpecRuntime.observe

    def damage(self, tree, verdict, step):
        observe(self, tree, verdict, step)
        if len(verdict.n_B) > 1:  # the golden outputs, asked one prompt at a time, would notice it first
            for tensor in (self.cache.k_LBGSD, self.cache.v_LBGSD):
                tensor.mul_(-1)

    monkeypatch.setattr(LongSpecRuntime, "observe", damage)
    with pytest.raises(LongtrainError, match=r"differs from decoding without the draft: \d of 4 texts"):
        run()
    assert (tmp_path / FOLDER / "results.json").is_file()


def test_settings_of_a_system_name_the_key_they_were_typed_under(run):
    with pytest.raises(ConfigError, match=r"^suite.systems: sparse: rule=foo; allowed: window"):
        run("suite.systems=[{name: sparse, rule: foo}]")
    with pytest.raises(ConfigError, match=r"sparse: chunk=4 is no option of rule=quest; its options: page"):
        run("suite.systems=[{method: {name: sparse, rule: quest, chunk: 4}}]")
    with pytest.raises(ConfigError, match=r"^suite.systems: sparse: layer=77; allowed: 0 to \d"):
        run("suite.systems=[{name: sparse, rule: reused, layer: 77}]")
    with pytest.raises(ConfigError, match=r"^select.every=4 and neither artifact= nor method= selects"):
        run("select.every=4")


def test_a_draft_over_an_evictor_is_measured_and_compared_with_its_own_cache(run, results):
    systems = "suite.systems=[snapkv,{artifact:draft,policy:snapkv}]"
    run(systems, "suite.budgets=[48]", "suite.speed_prompts=0")
    found = results()
    exact = {system["name"]: system["tasks"][0]["exactness"] for system in found["systems"]}
    assert list(exact) == ["full", "draft", "snapkv@48", "draft+snapkv@48"]
    assert exact["draft"]["different"] == 0 and exact["snapkv@48"] is None
    assert exact["draft+snapkv@48"]["compared"] == 4
    assert "snapkv@48 has no draft: its acceptance length has no meaning here" in found["notes"]


def test_a_method_without_training_needs_no_artifact(run, results, chat_target):
    target = f"target.path={chat_target}"
    run("artifact=null", "method=quantspec", target, "lengths=[128]", "suite.speed_prompts=0")
    assert [system["name"] for system in results()["systems"]] == ["full", "quantspec"]


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
        ("target.path=/no/where", ConfigError, "/no/where does not exist"),
        ("lengths=[4k]", DataError, "pass shorter lengths or longer text"),
        ("lengths=[]", ConfigError, r"suite.lengths=\[\]; allowed: one or more"),
        ("lengths=[two]", ConfigError, r"suite.lengths=\['two'\]; allowed: .*token counts"),
        ("suite.prompts=0", ConfigError, r"suite.prompts=0; allowed: .*1 or more"),
        ("suite.shapes=[[0,1]]", ConfigError, r"suite.shapes=\[\[0, 1\]\]; allowed: a list"),
        ("suite.shapes=4", ConfigError, r"suite.shapes=4; allowed: a list"),
        ("decode.temperature=hot", ConfigError, "decode.temperature=hot; allowed: a number"),
        ("decode.children=luck", ConfigError, "decode.children=luck; allowed: auto, point, iid"),
        ("suite.text=/no/text", DataError, "no held-out text at /no/text"),
        ("suite.text=data", ConfigError, "suite.text=data needs data=NAME"),
        ("suite.kinds=[chat]", DataError, "kinds there: book, code"),
        ("suite.name=speed", ConfigError, "no suite 'speed'; known: acceptance, eviction"),
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


def test_law_auto_samples_chains_where_decoding_samples() -> None:
    def children(temperature: float, widths: list[int], name: str = "auto") -> ChildChoice:
        decode = {"shape": widths, "children": name, "temperature": temperature}
        return RunConfig({"decode": decode}).decode.one_shape().children

    assert children(0.0, [1, 1]) is ChildChoice.POINT
    assert children(1.0, [1, 1]) is ChildChoice.IID
    assert children(1.0, [2, 2]) is ChildChoice.POINT
    assert children(1.0, [1, 1], "point") is ChildChoice.POINT
    with pytest.raises(ConfigError, match=r"this job wants one for all.*drafted: auto"):
        children(0.0, "auto")
