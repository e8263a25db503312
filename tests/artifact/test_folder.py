from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import resource
import signal

import pytest
import torch
from mutations import verify
from safetensors.torch import load_file, save_file

from longtrain.artifact import Artifact, Golden
from longtrain.artifact.evidence import Curve, Evidence
from longtrain.artifact.golden import KINDS
from longtrain.artifact.golden.checks import Check, Verification
from longtrain.artifact.inspection import inspect
from longtrain.decoding.engine import Engine
from longtrain.errors import ArtifactError, LongtrainError, TargetMismatchError
from longtrain.files import sealed
from longtrain.methods.longspec.config import Config
from longtrain.systems.build import artifact_facts
from longtrain.targets.loading import random_target

WHOLE = dataclasses.asdict(Config(window=16))


def edit(folder, **changes):
    path = folder / "longtrain.json"
    path.write_bytes(sealed(json.loads(path.read_text()) | changes))


def reseal(folder, name="model.safetensors"):
    """Make the checksum fit a changed file again."""
    files = json.loads((folder / "longtrain.json").read_text())["files"]
    edit(folder, files=files | {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()})


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    reseal(folder)


def test_round_trip_is_bit_equal(made, folder, module, target, config):
    back = Artifact.load(folder)
    assert back.method == "longspec" and back.typed_config() == config and back.target == target.info
    argv = ["__main__.py", *made.provenance["argv"][1:]]
    assert back.provenance == {**made.provenance, "argv": argv} and back.folder == folder
    for name, tensor in module.state_dict().items():
        assert torch.equal(back.tensors[name], tensor)
    built = back.build(target).state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in module.state_dict().items())
    golden = made.golden.tensors()
    assert back.golden.tensors().keys() == golden.keys() and {"k_1", "v_1"} <= golden.keys()
    assert all(torch.equal(tensor, golden[name]) for name, tensor in back.golden.tensors().items())


def test_loads_by_name_and_drafts(folder, target):
    parts = Artifact.load("draft", home=folder.parent.parent).attach(target)
    prompt = [[5, 6, 7, 8] * 10]
    drafted = Engine(target, parts).generate(prompt, max_new_tokens=12, ignore_eos=True)
    plain = Engine(target).generate(prompt, max_new_tokens=12, ignore_eos=True)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.draft_bytes > 0


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_target_of_this_machine_is_found_again_folder_or_file(made, target, tmp_path, is_folder):
    """The manifest names its last part alone, since others read it."""
    where = tmp_path / ("target" if is_folder else "target.gguf")
    where.mkdir() if is_folder else where.touch()
    named = dataclasses.replace(made, target=dataclasses.replace(target.info, name=str(where)))
    folder = named.save(tmp_path / "d")
    assert json.loads((folder / "longtrain.json").read_text())["target"]["name"] == where.name
    assert Artifact.load(folder).target.name == str(where)
    where.rmdir() if is_folder else where.unlink()
    assert Artifact.load(folder).target.name == where.name


def test_a_target_that_gives_no_numbers_is_told_and_costs_nobody_the_training(
    module, config, target, tmp_path
):
    half = copy.deepcopy(target).half()
    with torch.no_grad():
        half.model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
    made = Artifact.from_module("longspec", config, module=copy.deepcopy(module).half(), target=half)
    assert made.golden is None and "NaN or infinite in float16" in made.verification.faults[0]
    assert not Artifact.load(made.save(tmp_path / "d"), unverified=True).verified


def test_two_saves_write_the_same_bytes(made, tmp_path):
    one, two = made.save(tmp_path / "a" / "draft"), made.save(tmp_path / "b" / "draft")
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_card_tells_what_people_need(made, target, tmp_path):
    named = dataclasses.replace(made, target=dataclasses.replace(target.info, name="org/model"))
    folder = named.save(tmp_path / "d")
    Artifact.load(folder).describe(pictures={"training.png": b"x"})
    card = (folder / "README.md").read_text()
    front, body = card.split("---\n", 2)[1:]
    assert "base_model: org/model" in front and "datasets:\n- org/books" in front
    assert "python -m longtrain train +recipe=x 'prompt=a b'" in body
    assert "| org/books | abc | book | cc0-1.0 |" in body
    assert "![training](training.png)" in body
    assert 'Artifact.load("FOLDER")' in body and "`FOLDER` stands for the folder that holds this" in body
    assert "`window` | `16`" in body


def test_half_precision_target_gets_a_half_precision_module(folder):
    half = random_target("llama_micro", seed=0, dtype=torch.bfloat16)
    half.load_state_dict(random_target("llama_micro", seed=0).state_dict())
    artifact = Artifact.load(folder)
    info = dataclasses.replace(artifact.target, weights_hash="")
    module = dataclasses.replace(artifact, target=info).build(half)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_refuses_another_target(folder):
    with pytest.raises(TargetMismatchError, match="trained for llama_micro"):
        Artifact.load(folder).build(random_target("qwen3_micro"))


def test_missing_artifact_names_what_there_is(folder):
    with pytest.raises(ArtifactError, match=r"no artifact 'other'.*there: draft.*longtrain export"):
        Artifact.load("other", home=folder.parent.parent)


def test_folder_that_is_no_artifact(tmp_path):
    with pytest.raises(ArtifactError, match=r"holds no longtrain\.json"):
        Artifact.load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "golden.safetensors"])
def test_truncated_and_missing_files(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match=f"{name} is damaged or cut short"):
        Artifact.load(folder)
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} cannot be read: No such file"):
        Artifact.load(folder)


def test_changed_byte_is_caught(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256 differs"):
        Artifact.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "has schema 99; this longtrain reads 2"),
        ({"method": "os.system"}, r"names the method 'os.system'; known: .*longspec"),
        ({"config": {**WHOLE, "run": "rm"}}, "unknown key 'method.run'"),
        ({"config": {**WHOLE, "window": -1}}, r"window=-1; allowed"),
        (
            {"config": {**WHOLE, "window": "w", "cross_attention": "x"}},
            r"wrong .*window=w.*cross_attention=x",
        ),
        ({"config": None}, "has a wrong config: Input should be a valid dict"),
        ({"config": {"window": 16}}, "lacks config.cross_attention"),
        ({"verification": {"checks": [{"what": "x"}], "faults": []}}, "has a wrong verification.checks.0"),
        ({"golden": {"dtype": 3}}, "has a wrong golden.dtype: Input should be 'float64'"),
        ({"provenance": {"argv": 3}}, "has a wrong provenance.argv: "),
        (
            {"provenance": {"data": {"stages": [{"doc_tokens": "x"}]}}},
            "has a wrong provenance.data.stages.0.doc",
        ),
        ({"golden": {"dtype": "float8", "noise": {}}}, "golden.dtype: Input should be 'float64', 'float32'"),
        ({"golden": {"dtype": "float32", "noise": {}, "kind": "x"}}, "golden.kind: Input should be 'laws'"),
        ({"golden": {"dtype": "float32", "noise": {}, "kind": []}}, "golden.kind: Input should be 'laws'"),
        ({"golden": {"dtype": "float32"}}, r"has a wrong golden.noise"),
        (
            {"golden": {"dtype": "float32", "kind": "scores", "noise": {}}},
            r"golden.safetensors lacks near_FGT",
        ),
        ({"golden": None}, r"no golden outputs, so nothing shows .* unverified=true"),
        ({"config": {"window": math.nan}}, r"config.window=nan; allowed: numbers below"),
        ({"config": {"window": 10**30}}, r"config.window=an integer of 100 bits"),
        ({"config": {**WHOLE, "window": True}}, r"window=true; allowed"),
        ({"target": {"rope": {"theta": [math.inf]}}}, r"target.rope.theta.0=inf; allowed"),
        ({"target": {"name": "x"}}, "describes its target wrongly"),
        ({"target": {**random_target("llama_micro").info.to_json(), "head_dim": "x"}}, "no longspec module"),
    ],
)
def test_manifest_that_says_something_else(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(folder)


@pytest.mark.parametrize("content", ["{", "[" * 10**5, "\xff"])
def test_manifest_that_is_not_json(folder, content):
    (folder / "longtrain.json").write_text(content, encoding="latin-1")
    with pytest.raises(ArtifactError, match="cannot be read"):
        Artifact.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "golden.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ArtifactError, match="cannot be read: it is a pipe, not a regular file"):
        Artifact.load(folder)


def test_a_card_has_no_comparison_of_one_machine(folder):
    """A loaded artifact that fails on some machine is written about as it was exported."""
    artifact = Artifact.load(folder, unverified=True)
    artifact.describe()
    before = (folder / "README.md").read_bytes()
    artifact.verification.faults.append("its golden outputs differ here")
    artifact.describe()
    assert (folder / "README.md").read_bytes() == before
    edit(folder, verification={"checks": [], "faults": ["they differed at export"]})
    artifact.describe()
    assert "they differed at export" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["longtrain.json", "evidence.json"])
def test_any_value_of_a_json_file_that_is_changed_or_left_out_is_refused(folder, name):
    """Settings steer what a module does, and golden outputs need not show it: `pool_kernel`, say."""
    Artifact.load(folder).describe(Evidence({"train/loss": Curve([1, 2], [2.0, 1.0])}))
    content = json.loads((folder / name).read_text())

    def read():
        Artifact.load(folder)
        Evidence.of_folder(folder)

    def edited(values):
        """Each key changed, and each left out, at any depth."""
        for key, value in values.items():
            if isinstance(value, dict):
                yield from ({**values, key: changed} for changed in edited(value))
            else:
                yield {**values, key: "another" if isinstance(value, str) else [value]}
            yield {other: kept for other, kept in values.items() if other != key}

    read()
    for changed in edited(content):
        (folder / name).write_text(json.dumps(changed))
        with pytest.raises(ArtifactError, match=r"cannot be read: it (was changed|has no ch)|has schema"):
            read()


def test_what_its_export_could_not_verify_loads_only_when_asked_for(made, target, tmp_path):
    fault = "golden outputs are not reproduced by X: relative error 0.2, allowed 0.1"
    checks = [Check("X", 0.2, 0.1)]
    folder = dataclasses.replace(made, verification=Verification(checks, [fault])).save(tmp_path / "d")
    with pytest.raises(
        ArtifactError, match=r"is not verified: golden .* 0\.2.*longtrain inspect .*unverified"
    ):
        Artifact.load(folder)
    artifact = Artifact.load(folder, unverified=True)
    assert not artifact.verified and artifact.attach(target) is not None
    assert "unverified" in artifact_facts("d", artifact) and made.verified
    assert "unverified" not in artifact_facts("d", Artifact.load(made.save(tmp_path / "e")))
    card = (folder / "README.md").read_text()
    assert "## Unverified\n\nIt may not compute what was trained" in card and "| X | 0.2 | 0.1 | NO |" in card
    assert "## Unverified" not in (tmp_path / "e" / "README.md").read_text()
    found = inspect(str(folder))
    assert found.fault == fault and found.facts["failed 1"] == "X: relative error 0.2, allowed 0.1 FAILED"
    assert not inspect(str(folder), unverified=True).fault


def test_a_load_that_does_not_verify_is_noted_when_asked_for(folder, target):
    change_tensors(folder, lambda tensors: tensors["cross_attn.q_proj.weight"][:8].mul_(1.1))
    with pytest.raises(ArtifactError, match=r"not reproduced .*; export again; unverified=true"):
        Artifact.load(folder).attach(target)
    artifact = Artifact.load(folder, unverified=True)
    assert artifact.verified
    parts = [artifact.attach(target) for _ in range(2)]
    assert parts[0].draft is not None and len(artifact.verification.faults) == 1
    assert "not reproduced by the draft in fp32" in artifact.verification.faults[0]
    assert "unverified=true" not in artifact.verification.faults[0]  # who reads it may have passed that


def test_without_golden_outputs_an_artifact_loads_only_when_asked_for(folder, target):
    edit(folder, golden=None)
    artifact = Artifact.load(folder, unverified=True)
    assert artifact.golden is None and artifact.build(target) is not None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_whatever_is_asked_for(folder, target, module, config, value):
    def change(tensors):
        tensors["mlp.up_proj.weight"][0, 0] = value

    change_tensors(folder, change)
    with pytest.raises(ArtifactError, match=r"1 of 3840 values of mlp.up_proj.weight are NaN or infinite"):
        Artifact.load(folder, unverified=True)
    broken = copy.deepcopy(module)
    change(broken.state_dict())
    with pytest.raises(ArtifactError, match="the trained longspec module: 1 of 3840"):
        Artifact.from_module("longspec", config, module=broken, target=target)


REFUSED = "holds other numbers than|cannot be asked for its golden laws|golden laws are|not reproduced by"
GOLDEN_FAULTS = {
    "scalar": (torch.tensor(1.0), REFUSED),
    "empty": (torch.zeros(0), REFUSED),
    "flat": (torch.zeros(5), REFUSED),
    "bytes": (torch.zeros(5, dtype=torch.uint8), REFUSED),
    "absent": (None, "lacks|which the artifact does not hold"),
}


@pytest.mark.parametrize("fault", GOLDEN_FAULTS)
def test_every_golden_tensor_of_another_kind_is_one_sentence(made, target, fault):
    value, message = GOLDEN_FAULTS[fault]
    stored = made.golden.tensors()
    for name in stored:
        others = {key: tensor for key, tensor in stored.items() if key != name}
        with pytest.raises(ArtifactError, match=message) as caught:
            golden = Golden.from_tensors(
                KINDS["laws"], others if value is None else {**others, name: value}, "float32"
            )
            verify(golden, made._parts, target)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logq_CDV", torch.nan, "not reproduced by the draft in fp32"),
        ("k_1", torch.inf, "not reproduced by the draft in fp32"),
        ("ids_T", -1, "ids_T holds other numbers than the 97 token ids"),
        ("ids_T", 97, "ids_T holds other numbers than the 97 token ids"),
    ],
)
def test_golden_values_out_of_range(made, target, name, value, message):
    stored = {key: tensor.clone() for key, tensor in made.golden.tensors().items()}
    stored[name].view(-1)[0] = value
    with pytest.raises(ArtifactError, match=message):
        verify(Golden.from_tensors(KINDS["laws"], stored, "float32"), made._parts, target)


def test_tensors_missing_unexpected_and_of_another_shape(folder):
    def change(tensors):
        tensors["mlp.extra"] = tensors.pop("mlp.up_proj.weight")
        tensors["input_layernorm.weight"] = torch.ones(3)

    change_tensors(folder, change)
    with pytest.raises(ArtifactError, match="tensors") as caught:
        Artifact.load(folder)
    text = str(caught.value)
    assert 'Missing key(s) in state_dict: "mlp.up_proj.weight"' in text and '"mlp.extra"' in text
    assert "size mismatch for input_layernorm.weight" in text and "\n" not in text


def test_pickles_are_never_read(folder):
    torch.save({"x": torch.zeros(1)}, folder / "model.safetensors")
    reseal(folder)
    with pytest.raises(ArtifactError, match="damaged"):
        Artifact.load(folder)


def test_altered_tensor_with_a_fitting_checksum_is_caught_by_the_golden_outputs(folder, target):
    change_tensors(folder, lambda tensors: tensors["cross_attn.q_proj.weight"][:8].mul_(1.1))
    with pytest.raises(ArtifactError, match="golden outputs are not reproduced"):
        Artifact.load(folder).build(target)
    assert Artifact.load(folder).build(target, verify=False) is not None


def test_disk_full_leaves_the_old_artifact(made, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(LongtrainError, match=r"cannot write .*what was there is unchanged"):
            made.save(folder)
        with pytest.raises(LongtrainError, match="cannot write"):
            made.save(folder.parent / "fresh")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_save_replaces_an_artifact_and_nothing_else(made, folder, tmp_path):
    (folder / "stale.png").write_text("old")
    made.save(folder)
    assert not (folder / "stale.png").exists()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(LongtrainError, match=r"not replaced by an artifact, since it holds notes\.txt"):
        made.save(folder)
    assert (folder / "notes.txt").read_text() == "keep"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(LongtrainError, match=r"not replaced by an artifact, since it holds notes\.txt"):
        made.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
