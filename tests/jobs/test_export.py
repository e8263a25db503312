from __future__ import annotations

import json
import shutil

import pytest
import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.artifact.inspection import inspect
from longtrain.assets import bundled_artifacts
from longtrain.data.packing.prepared import PreparedWriter
from longtrain.errors import ArtifactError, ConfigError, LongtrainError, TargetMismatchError
from longtrain.files import sealed
from longtrain.jobs import eval as evaluation
from longtrain.jobs import export, generate
from longtrain.targets.loading import load_target
from longtrain.training import checkpoint
from longtrain.training.tensor_file import pieces_of


def test_export_writes_what_was_trained(composed, trained, tmp_path, target_folder):
    export.run(composed("export", "target.shard=fsdp2"))  # one process exports, with the whole target
    folder = tmp_path / "checkpoints" / "one"
    names = {path.name for path in folder.iterdir()} - {"local.json"}
    tensors = {"model.safetensors", "golden.safetensors"}
    assert names == {"longtrain.json", *tensors, "README.md", "training.png", "evidence.json"}
    artifact = Artifact.load("one", home=tmp_path)
    assert artifact.config["window"] == 16 and artifact.provenance["step"] == 7
    assert all(torch.equal(artifact.tensors[name], tensor) for name, tensor in trained.state_dict().items())
    artifact.attach(load_target(target_folder))


def test_export_stores_the_target_s_precision(composed, trained, tmp_path):
    export.run(composed("export", "target.dtype=bfloat16"))
    artifact = Artifact.load("one", home=tmp_path)
    assert {tensor.dtype for tensor in artifact.tensors.values()} == {torch.bfloat16}
    assert artifact.golden.dtype == "bfloat16"


def test_card_names_the_data_and_its_licences(composed, trained, tmp_path):
    data = tmp_path / "data" / "mix-0123"
    data.mkdir(parents=True)
    part = {"hub": "org/corpus", "commit": "c0ffee", "kind": "book", "licence": "cc0-1.0"}
    writer = PreparedWriter(data, 256)
    writer.add(torch.zeros(9).numpy(), torch.ones(9).numpy(), name="a", kind="book")
    sources = [
        {"source": {"reader": "manifest", "where": "corpus", "kind": ""}, "inputs": {"parts": [part]}},
        {"source": {"reader": "text", "where": "my/books", "kind": "book"}, "inputs": {"files": [{}, {}]}},
    ]
    writer.close({"sources": sources})
    sha256 = json.loads((data / "manifest.json").read_text())["sha256"]
    about = tmp_path / "runs" / "one" / "train" / "provenance.json"
    made = json.loads(about.read_text())
    about.write_bytes(sealed({**made, "data": {"name": "mix", "sha256": sha256}}))
    export.run(composed("export"))
    card = (tmp_path / "checkpoints" / "one" / "README.md").read_text()
    assert "datasets:\n- org/corpus\n" in card and "| org/corpus | c0ffee | book | cc0-1.0 |" in card
    assert "| my/books | 2 files | book | not stated |" in card
    about.write_text(about.read_text().replace('"mix"', '"mux"'))
    with pytest.raises(ArtifactError, match=r"provenance\.json cannot be read: it was changed since it was"):
        export.run(composed("export"))
    export.run(composed("export", "unverified=true"))  # the training is not lost
    lost = Artifact.load("one", home=tmp_path).provenance
    assert lost["unchecked"] == [about.name] and not lost["data"].get("name")
    assert "was damaged at export" in inspect(str(tmp_path / "checkpoints" / "one")).facts["unchecked"]


def test_nothing_trained_under_this_name(composed):
    with pytest.raises(ConfigError, match=r"nothing was trained under name=one: .*; train first"):
        export.run(composed("export"))


def planned(folder, steps):
    """The run's checkpoint again, of a run of so many steps."""
    saved = checkpoint.read(folder / "checkpoints" / "last.ckpt")
    about = {"step": saved.step, "facts": {**saved.facts, "trainer.max_steps": steps}}
    weights = {checkpoint.WEIGHTS: pieces_of(checkpoint.trained_tensors(saved.path))}
    assert checkpoint.write(folder / "checkpoints", about, weights, writer=True) is None


def test_a_run_that_was_cut_short_is_exported_where_this_is_asked_for_and_says_so(
    composed, trained, tmp_path, caplog
):
    folder = tmp_path / "runs" / "one" / "train"
    planned(folder, 9)
    with pytest.raises(ConfigError, match=r"run one is at step 7 of 9: it was cut short; .*unfinished=true"):
        export.run(composed("export"))
    assert not (tmp_path / "checkpoints").exists()
    caplog.set_level("INFO")
    export.run(composed("export", "unfinished=true"))
    assert "step=7 verified" in caplog.text and "unfinished: step 7 of 9" in caplog.text
    artifact = Artifact.load("one", home=tmp_path)
    assert artifact.provenance["unfinished"] == "step 7 of 9"
    card = (artifact.folder / "README.md").read_text()
    assert card.count("cut short") == 2 and "this is step 7 of 9" in card
    assert "unfinished: step 7 of 9" in str(inspect(str(artifact.folder)))


@pytest.mark.parametrize("ended", ["its last step", "a callback"])
def test_a_run_that_came_to_its_end_is_exported_without_a_word(composed, trained, tmp_path, ended):
    folder = tmp_path / "runs" / "one" / "train"
    planned(folder, 7 if ended == "its last step" else 9)
    if ended == "a callback":
        (folder / "summary.json").write_text('{"steps": 7}')
    export.run(composed("export"))
    assert "unfinished" not in Artifact.load("one", home=tmp_path).provenance


def test_export_never_replaces_a_training_run(composed, trained, tmp_path):
    """The names `../one` of a run, refused by the command line, would make both one folder."""
    run = tmp_path / "runs" / "one"
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    artifact = Artifact.load(bundled_artifacts()["tiny_longspec"])
    with pytest.raises(
        LongtrainError, match=r"one exists and is not replaced by an artifact, since it holds"
    ):
        artifact.save(tmp_path / "checkpoints" / ".." / "runs" / "one")
    with pytest.raises(LongtrainError, match=r"by an artifact, since it holds weights\.safetensors"):
        artifact.save(run / "train" / "checkpoints" / "last.ckpt")
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_an_artifact_behind_a_link_is_exported_again_behind_it(composed, trained, tmp_path):
    big = tmp_path / "big" / "one"
    export.run(composed("export"))
    big.parent.mkdir()
    (tmp_path / "checkpoints" / "one").rename(big)
    (tmp_path / "checkpoints" / "one").symlink_to(big)
    (big / "model.safetensors").write_bytes(b"old")
    for _ in range(2):
        export.run(composed("export"))
        assert (tmp_path / "checkpoints" / "one").is_symlink() and Artifact.load(big).method == "longspec"
        assert [path.name for path in big.parent.iterdir()] == ["one"]


def test_another_method_than_was_trained(composed, trained):
    with pytest.raises(ConfigError, match="was trained with method=longspec, not pretrain"):
        export.run(composed("export", "method=pretrain"))


def test_corrupt_checkpoint(composed, trained, tmp_path):
    path = tmp_path / "runs" / "one" / "train" / "checkpoints" / "last.ckpt" / "weights.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match="damaged"):
        export.run(composed("export"))
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoint_of_another_module(composed, trained, tmp_path, target_folder):
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises((ArtifactError, TargetMismatchError)):
        export.run(composed("export", f"target.path={other}"))
    assert not (tmp_path / "checkpoints").exists()


def test_configuration_changed_after_training(composed, trained, tmp_path):
    path = tmp_path / "runs" / "one" / "train" / "config.yaml"
    path.write_text(path.read_text().replace("window: 16", "window: 64"))
    with pytest.raises(ArtifactError, match=r"is not what .*\(method.window: 16 -> 64\)") as error:
        export.run(composed("export"))
    assert "\n" not in str(error.value) and not (tmp_path / "checkpoints").exists()


def test_target_of_other_weights(composed, trained, tmp_path, target_folder):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    tensors = load_file(other / "model.safetensors")
    tensors = {name: tensor + 0.5 for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="was trained on a target with weights"):
        export.run(composed("export", f"target.path={other}"))
    assert not (tmp_path / "checkpoints").exists()


def test_run_folder_without_its_configuration(composed, trained, tmp_path):
    (tmp_path / "runs" / "one" / "train" / "config.yaml").unlink()
    with pytest.raises(ArtifactError, match=r"config\.yaml is missing or damaged"):
        export.run(composed("export"))


def test_push_without_login_is_one_clear_error(composed, trained, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="cannot push to org/one"):
        export.run(composed("export", "push=org/one"))
    assert not (tmp_path / "checkpoints").exists()  # told before the work


def leave_results(folder, weights):
    """What an evaluation of a system with these weights leaves behind."""
    interval = {"value": 2.5, "low": 2.4, "high": 2.6, "n": 8}
    system = {"name": "one", "kind": "artifact", "budget": None, "average": interval, "versus_full": None}
    system |= {"facts": {"artifacts": [{"weights": weights}]}, "acceptance": None, "facets": []}
    results = {
        "suite": folder.name,
        "title": "T",
        "notes": [],
        "systems": [system],
        "scale": {"name": "score"},
    }
    results |= {"target": {"name": "/home/me/t", "dtype": "float32"}, "protocol": {"hash": "aa"}}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "budget.png").write_bytes(b"a picture")


def test_what_was_exported_is_pushed_with_what_its_run_measured_since(
    composed, trained, tmp_path, monkeypatch
):
    export.run(composed("export", "licence=mit"))
    shutil.rmtree(tmp_path / "runs" / "one" / "train" / "checkpoints")
    artifact, sent = Artifact.load("one", home=tmp_path), []
    for suite, weights in {"needle": artifact.checksum(), "ruler": "those of another"}.items():
        leave_results(tmp_path / "runs" / "one" / "eval" / suite, weights)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("longtrain.artifact.folder.upload", lambda *where, **how: sent.append((where, how)))
    monkeypatch.setattr(export, "load_target", None)  # no target is needed
    export.run(composed("export", "artifact=one", "push=org/one", "collection=org/All"))
    (((folder, repo), how),) = sent
    assert (folder, repo, how["private"]) == (tmp_path / "checkpoints" / "one", "org/one", True)
    assert how["collection"] == "org/All" and {"README.md", "*.png", "evidence.json"} <= set(how["patterns"])
    card = (folder / "README.md").read_text()
    assert "license: mit" in card and "artifact=hub:org/one" in card and "/home/me" not in card
    assert "![needle-budget](needle-budget.png)" in card and "2.50 \\[2.40, 2.60\\]" in card
    assert "ruler" not in card.split("## Limits")[0].split("## Results")[1]
    export.run(composed("export", "artifact=one", "push=org/one", "licence=apache-2.0"))
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    assert Artifact.load("one", home=tmp_path).provenance["license"] == "apache-2.0"
    with pytest.raises(ConfigError, match="push takes a folder of this machine"):
        export.run(composed("export", "artifact=hub:org/two", "push=org/one"))


def test_an_artifact_that_ships_is_pushed_and_stays_as_it_is(composed, tmp_path, monkeypatch):
    shipped = bundled_artifacts()["tiny_longspec"]
    before, cards = (shipped / "README.md").read_bytes(), []
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(
        "longtrain.artifact.folder.upload", lambda at, *_, **__: cards.append((at / "README.md").read_text())
    )
    export.run(composed("export", "name=x", "artifact=tiny_longspec", "push=org/mine"))
    assert "# mine\n" in cards[0] and "artifact=hub:org/mine" in cards[0]
    assert (shipped / "README.md").read_bytes() == before


def test_a_synthetic_source_names_the_text_it_is_written_into():
    def item(reader, where, inputs, **more):
        return {"source": {"reader": reader, "where": where, **more}, "inputs": inputs}

    files = {"files": [{}]}
    items = [
        item("text", "bundled:train", files, split="train"),
        item("text", "bundled:heldout", files, split="val"),
        item("jsonl", "asked", files, adapter="instruct"),
    ]
    texts = [one["source"]["where"] for one in items if export._is_text(one["source"])]
    (entry,) = export._entries(item("synthetic", "questions", {"synthetic": "questions"}), texts)
    assert entry["name"] == "synthetic questions, written into bundled:train"
    assert export._entries(items[2], texts)[0]["name"] == "asked"


def test_a_comparison_that_fails_costs_nobody_the_training(
    composed, trained, tmp_path, monkeypatch, text, capsys
):
    """The artifact is on disk, marked with the numbers; eval and generate run it if asked to, and say so."""
    with monkeypatch.context() as patch:
        patch.setattr("longtrain.artifact.golden.outputs.STRICT", -1.0)
        with pytest.raises(ArtifactError, match=r"is written but not verified: .*0.*longtrain inspect"):
            export.run(composed("export"))
        export.run(composed("export", "unverified=true"))  # which a list of jobs goes on from
    folder = tmp_path / "checkpoints" / "one"
    manifest = json.loads((folder / "longtrain.json").read_text())
    assert manifest["verification"]["checks"][0]["limit"] == -1.0
    assert len(manifest["verification"]["faults"]) == 1
    assert "## Unverified" in (folder / "README.md").read_text()
    assert (folder / "training.png").is_file() and (folder / "evidence.json").is_file()
    asked = ("artifact=one", "decode.max_new_tokens=4")
    with pytest.raises(ArtifactError, match=r"is not verified: .*unverified=true"):
        generate.run(composed("generate", *asked, "prompt=a b c"))
    capsys.readouterr()
    generate.run(composed("generate", *asked, "prompt=a b c", "unverified=true"))
    assert capsys.readouterr().err.splitlines()[-1].startswith("[UNVERIFIED artifact one | 4 tokens")
    small = ("suite=smoke", "lengths=[64]", "suite.prompts=2", "suite.bootstrap=5", "suite.speed_prompts=0")
    evaluation.run(composed("eval", *small, *asked, f"suite.text={text}", "unverified=true"))
    results = json.loads((tmp_path / "runs/one/eval/acceptance/results.json").read_text())
    assert results["notes"][0].startswith("UNVERIFIED: one did not verify")
    assert results["systems"][1]["facts"]["artifacts"][0]["unverified"] is True
    assert "note: UNVERIFIED: one did not verify" in capsys.readouterr().out
    export.run(composed("export"))
    assert Artifact.load("one", home=tmp_path).verified
    card = (folder / "README.md").read_text()
    assert "## Unverified" not in card and "- UNVERIFIED: one did not verify" in card


@pytest.mark.parametrize("error", [ArtifactError, ConfigError, RuntimeError])
def test_golden_outputs_that_cannot_be_recorded_cost_nobody_the_training(
    composed, trained, tmp_path, monkeypatch, error
):
    def fails(*_, **__):
        raise error("the draft does not sample its chain")

    with monkeypatch.context() as patch:
        patch.setattr("longtrain.artifact.golden.kinds._forced", fails)
        with pytest.raises(ArtifactError, match=r"is written but not verified: its golden outputs could not"):
            export.run(composed("export"))
    assert Artifact.load("one", home=tmp_path, unverified=True).golden is None


def test_a_run_of_an_earlier_version_is_exported_without_settings_that_are_gone():
    old = {"name": "longspec", "window": 9, "views": ["full", {"cache": "int4"}]}
    assert export._config(methods.get("longspec"), old).window == 9
    members = {"members": {"eagle3": {"depths": 3, "views": ["full"]}, "longspec": {}}}
    assert export._config(methods.get("joint"), members).members.eagle3.depths == 3
    with pytest.raises(ArtifactError, match="method longspec has no vieuws"):
        export._config(methods.get("longspec"), {"vieuws": ["full"]})
