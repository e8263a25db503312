from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from omegaconf import OmegaConf

from longtrain import cli, methods, provenance
from longtrain.artifact import Artifact
from longtrain.artifact.inspection import inspect
from longtrain.errors import ArtifactError, ConfigError, LongtrainError
from longtrain.files import sealed
from longtrain.jobs import export, generate
from longtrain.methods.eagle3.config import Config
from longtrain.methods.longspec.config import Config as LongSpecConfig
from longtrain.targets.loading import load_target
from longtrain.training import checkpoint
from longtrain.training.tensor_file import pieces_of


@pytest.fixture
def eagle(trained_draft):
    """What a training run of a draft leaves behind."""
    return trained_draft()


@pytest.fixture
def trained_draft(tmp_path, target_folder):
    """`trained_draft(**hyperparameters)`: leaves behind what a training run does, and gives the module."""
    return lambda **fields: _leave_a_run(tmp_path, target_folder, fields)


def _leave_a_run(tmp_path, target_folder, fields):
    config = Config(**{"layers": [0], "draft_vocab_size": 0, "window": 20, **fields})
    module = methods.get("eagle3").build(config, load_target(target_folder).info)
    return _leave(tmp_path, target_folder, "eagle3", module, config)


def _leave(tmp_path, target_folder, name, module, config):
    target = load_target(target_folder)
    folder = tmp_path / "runs" / "one" / "train"
    (folder / "checkpoints").mkdir(parents=True)
    method = {f"method.{key}": value for key, value in {"name": name, **vars(config)}.items()}
    who = {"target.weights": target.info.weights_hash, "target.tokenizer": target.info.tokenizer_hash}
    about = {"step": 7, "facts": checkpoint.flat({"method": {"name": name, **vars(config)}}) or method}
    about["facts"] |= {**who, "target.name": str(target_folder)}
    weights = {checkpoint.WEIGHTS: pieces_of(module.state_dict())}
    assert checkpoint.write(folder / "checkpoints", about, weights, writer=True) is None
    settings = {"method": {"name": name, **vars(config)}, "target": {"path": str(target_folder)}}
    stages = [{"doc_tokens": 64}, {"doc_tokens": 4096}]
    provenance.write(folder, OmegaConf.to_container(OmegaConf.create(settings)), data={"stages": stages})
    return module


@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_a_run_becomes_a_folder_that_engines_load(composed, eagle, tmp_path, target_folder, form):
    export.run(composed("export", f"format={form}", "licence=mit"))
    folder = tmp_path / "checkpoints" / f"one-{form}"
    assert Artifact.load(tmp_path / "checkpoints" / "one").method == "eagle3"
    config = json.loads((folder / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    assert config["trained_max_tokens"] == 4096 and layer["max_position_embeddings"] == 4096
    assert layer["sliding_window"] == 21 and not list(folder.glob(".*"))
    card = (folder / "README.md").read_text()
    assert "--speculative-config" in card and str(target_folder.parent) not in card
    assert "## Training" in card and "Data: not recorded." in card and "- step: 7" in card
    assert card.startswith("---\nlicense: mit\n") and "Licence of the module: mit; of the target:" in card
    found = inspect(str(folder))
    assert not found.fault and "parameters in" in found.facts["tensors"]
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-7])
    assert "model.safetensors" in inspect(str(folder)).fault
    (folder / "model.safetensors").write_bytes(whole)
    assert ("--speculative-draft-window-size 21" in card) == (form == "flat")
    with pytest.raises(ArtifactError, match=r"predicts \d.* always drafting the commonest one gives"):
        export.run(composed("export", f"verify={folder}"))  # with the target: it was not trained
    export.run(composed("export", f"verify={folder}", "target.path=null"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="damaged"):
        export.run(composed("export", f"verify={folder}"))


@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_a_block_draft_becomes_a_folder_that_decodes(composed, tmp_path, target_folder, form, capsys):
    target, method = load_target(target_folder), methods.get("dspark")
    config = method.config(layers=[0], n_layers=1, block_size=4, markov_rank=4, mask_token=2)
    module = method.build(config, target.info)
    module.mask_id.fill_(2)
    torch.nn.init.normal_(module.markov_head.markov_w2.weight, std=0.1)
    _leave(tmp_path, target_folder, "dspark", module, config)
    export.run(composed("export", f"format={form}", "method=dspark"))
    folder = tmp_path / "checkpoints" / f"one-{form}"
    assert '"method": "dspark"' in (folder / "README.md").read_text()
    assert not inspect(str(folder)).fault
    words = ("prompt=abc", "decode.max_new_tokens=6")
    generate.run(composed("generate", *words, "artifact=null"))
    plain = capsys.readouterr().out
    generate.run(composed("generate", *words, f"artifact={folder}"))
    drafted, metrics = capsys.readouterr()
    assert drafted == plain and "acceptance length" in metrics


def test_one_format_becomes_the_other(composed, eagle, tmp_path):
    export.run(composed("export", "format=flat"))
    flat = tmp_path / "checkpoints" / "one-flat"
    export.run(composed("export", f"artifact={flat}", "format=speculators"))
    both = [Artifact.load(path) for path in (flat, tmp_path / "checkpoints" / "one-flat-speculators")]
    assert both[0].config == both[1].config
    assert all(bool((both[1].tensors[name] == tensor).all()) for name, tensor in both[0].tensors.items())


def test_such_a_folder_decodes_in_the_place_of_an_artifact(composed, eagle, tmp_path, capsys):
    export.run(composed("export", "format=speculators"))
    folder = tmp_path / "checkpoints" / "one-speculators"
    words = ("prompt=abc", "decode.max_new_tokens=4", "artifact=null")
    generate.run(composed("generate", *words))
    plain = capsys.readouterr().out
    generate.run(composed("generate", *words[:2], f"artifact={folder}"))
    drafted, metrics = capsys.readouterr()
    assert drafted == plain and "acceptance length" in metrics


def test_a_refused_format_leaves_nothing(composed, eagle, tmp_path):
    export.run(composed("export"))
    artifact = Artifact.load("one", home=tmp_path)
    path = tmp_path / "checkpoints" / "one" / "longtrain.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["norm_before_residual"] = True
    path.write_bytes(sealed(manifest | {"golden": None}))
    (tmp_path / "checkpoints" / "one").rename(tmp_path / "two")
    with pytest.raises(ConfigError, match="SGLang begins the residual"):
        export.run(composed("export", f"artifact={tmp_path / 'two'}", "format=flat", "unverified=true"))
    assert not list((tmp_path / "checkpoints").iterdir()) and artifact.tensors


def test_a_folder_of_this_machine_is_not_uploaded(composed, eagle, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    with pytest.raises(ConfigError, match="would name the target by a folder of this machine"):
        export.run(composed("export", "format=speculators", "push=org/one"))
    assert not (tmp_path / "checkpoints" / "one-speculators").exists()
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    with pytest.raises(ConfigError, match="cannot push to org/one"):  # nothing but the network is missing
        export.run(composed("export", "format=flat", "push=org/one"))


def test_another_folder_is_not_overwritten(composed, eagle, tmp_path):
    theirs = tmp_path / "checkpoints" / "one-flat"
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(LongtrainError, match=r"holds notes\.txt, which is no part of one; move it"):
        export.run(composed("export", "format=flat"))
    assert (theirs / "notes.txt").read_text() == "mine"


def test_a_retrieval_head_becomes_a_folder_for_sglang(composed, tmp_path, target_folder):
    target, one = load_target(target_folder), {"n_kv_heads": 1, "mapping": "calibrated"}
    for name, fields in {"served": {"variant": "embedding", **one}, "own": {"layers": [0]}}.items():
        config = methods.config_class("specontext")(**fields)
        module = methods.get("specontext").build(config, target.info)
        made = Artifact.from_module("specontext", config, module=module, target=target)
        made.save(tmp_path / "checkpoints" / name)
    words = ("export", "format=sglang")
    for _ in range(2):  # its own folder is written again
        export.run(composed(*words, f"artifact={tmp_path / 'checkpoints' / 'served'}"))
    folder = tmp_path / "checkpoints" / "served-sglang"
    card = (folder / "README.md").read_text()
    assert "specontext_sglang.register()" in card and str(target_folder.parent) not in card
    export.run(composed("export", f"verify={folder}"))
    assert not inspect(str(folder)).fault
    with pytest.raises(ConfigError, match="tokens and no hidden states"):
        export.run(composed(*words, f"artifact={tmp_path / 'checkpoints' / 'own'}"))
    assert not (tmp_path / "checkpoints" / "own-sglang").exists()


def test_what_has_no_such_format(composed, trained, tmp_path):
    with pytest.raises(ConfigError, match="format=onnx; allowed: flat, peft, sglang, speculators"):
        export.run(composed("export", "format=onnx"))
    with pytest.raises(ConfigError, match="format=flat: method longspec has no such format"):
        export.run(composed("export", "format=flat"))
    with pytest.raises(ArtifactError, match=r"in a format that is known \(flat, peft, sglang, speculators\)"):
        export.run(composed("export", f"verify={tmp_path}"))
    known = "dspark: speculators, flat; eagle3: speculators, flat; lookaheadkv: peft; specontext: sglang"
    with pytest.raises(ArtifactError, match=rf"that a method reads \({known}\)"):
        Artifact.load(tmp_path)


def test_an_artifact_of_our_own_is_verified(composed, trained, target_folder, tmp_path, caplog):
    target = load_target(target_folder)
    made = Artifact.from_module("longspec", LongSpecConfig(window=16), module=trained, target=target)
    folder = made.save(tmp_path / "checkpoints" / "it")
    with caplog.at_level("INFO"):
        export.run(composed("export", f"verify={folder}", "target.path=null"))
    assert "method=longspec files and golden outputs" in caplog.text
    (folder / "golden.safetensors").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"golden\.safetensors"):
        export.run(composed("export", f"verify={folder}"))


def test_verify_may_be_typed_as_a_flag(monkeypatch):
    assert cli._ordered(["--config-name=export", "--verify", "DIR", "name=x"]) == [
        "--config-name=export",
        "verify=DIR",
        "name=x",
    ]
    monkeypatch.setattr(sys, "argv", ["longtrain"])
    with pytest.raises(SystemExit):
        cli._ordered(["--verify"])


@pytest.mark.parametrize("fields", [{"sinks": 4}, {"layers": [0, 1]}], ids=["sinks", "last layer"])
def test_a_refused_format_of_a_run_leaves_no_artifact(composed, trained_draft, tmp_path, fields):
    trained_draft(**fields)
    with pytest.raises(ConfigError, match=r"method.(sinks|layers)"):
        export.run(composed("export", "format=flat"))
    assert not (tmp_path / "checkpoints").exists()


def test_folders_of_two_runs_do_not_replace_each_other(composed, eagle, tmp_path):
    export.run(composed("export"))
    checkpoints = tmp_path / "checkpoints"
    for run in ("runA", "runB"):
        shutil.copytree(checkpoints / "one", checkpoints / run / "eagle3")
    export.run(composed("export", "artifact=runA/eagle3", "format=flat"))
    export.run(composed("export", f"artifact={checkpoints / 'runB' / 'eagle3'}", "format=flat"))
    assert {path.name for path in checkpoints.iterdir() if path.name.endswith("-flat")} == {
        "runA-eagle3-flat",
        "runB-eagle3-flat",
    }
