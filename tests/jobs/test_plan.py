from __future__ import annotations

import json
import math

import numpy as np
import pytest

from longtrain.assets import asset_dir
from longtrain.data.packing.pack import plan_run
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError
from longtrain.features.forms import Form
from longtrain.features.identity import Identity
from longtrain.jobs import plan, prepare
from longtrain.jobs.planning import run_plan

PATTERNED = [
    file.stem for file in asset_dir("recipes").glob("*.yaml") if "lr_multipliers" in file.read_text()
]
STAGE = "data.stages=[{epochs: 2, sequence_tokens: 64, doc_tokens: 32}]"


@pytest.mark.parametrize("rows", ["trainer.accumulate_grad_batches=1", "trainer.sequences_per_step=2"])
def test_prepared_data_gives_the_steps_of_an_epoch(composed, text, tmp_path, monkeypatch, rows):
    for number in range(12):
        (text / f"more{number}.txt").write_text(f"Chapter {number}. " * 40)
    data = ("data=text", f"data.text={text}", "data.val_fraction=0.5", "data.min_doc_tokens=8", STAGE)
    prepare.run(composed("prepare", *data))
    (manifest,) = (tmp_path / "data").glob("*/manifest.json")
    counts = json.loads(manifest.read_text())["counts"]
    tables = []
    monkeypatch.setattr(plan, "of_rows", lambda rows, columns, **_: tables.append(rows) or "")
    plan.run(composed("plan", "method=longspec", *data, "trainer.devices=2", rows))
    steps = 2 * (counts["tokens"] - counts["val_tokens"]) // (64 * 2)
    assert steps > 2 and [row["steps"] for row in tables[0]] == [steps]


def test_rows_hold_as_many_documents_as_they_will(composed, tmp_path):
    """Of prepared data the fullest row counts; before, prompts of the usual length."""
    words = ["+recipe=lookaheadkv_tiny", "target.path=tiny", "data.answers=source", "data.questions=12"]
    words += ["data.stages=[{steps: 2, sequence_tokens: 8192, doc_tokens: 4096}]"]

    def row():
        plan.run(composed("plan", *words, f"json={tmp_path / 'plan.json'}"))
        return json.loads((tmp_path / "plan.json").read_text())["stages"][0]

    before = row()
    assert before["documents"] == int(8192 / (768 / math.log(4) + 48))
    cfg = composed("prepare", *words)
    prepare.run(cfg)
    after = row()
    (folder,) = (tmp_path / "data").glob("lookaheadkv_tiny-????????")
    data, stages = Prepared.open(folder), cfg.stages
    rows = plan_run(data, stages, sequences_per_step=before["sequences_per_step"], seed=0, min_doc_tokens=64)
    assert after["documents"] == np.diff(rows.row_ptr).max() > 8192 / 4096
    module = [one["memory_bytes"]["module"] for one in (before, after)]
    assert module[1] / module[0] == pytest.approx(after["documents"] / before["documents"])


def test_without_data_the_steps_are_not_known(composed, text, monkeypatch, capsys):
    tables = []
    monkeypatch.setattr(plan, "of_rows", lambda rows, columns, **_: tables.append(rows) or "")
    plan.run(composed("plan", "method=longspec", "data=text", f"data.text={text}", STAGE))
    assert tables[0][0]["steps"] is None
    monkeypatch.undo()
    words = ("method=longspec", "data=text", f"data.text={text}", STAGE, "trainer.accelerator=cuda")
    plan.run(composed("plan", *words))
    assert "Hours are not known" in capsys.readouterr().out
    plan.run(composed("plan", *words, "tokens=64k"))
    said = capsys.readouterr().out
    assert "All stages take" in said and " 2048 |" in said  # two epochs of 64k tokens in rows of 64


def test_no_times_on_a_processor_and_what_prepare_writes_is_told(composed, text, monkeypatch, capsys):
    tables = []
    monkeypatch.setattr(plan, "of_rows", lambda rows, columns, **_: tables.append(rows) or "")
    base = ("data=text", f"data.text={text}", "data.stages=[{steps: 3, sequence_tokens: 64, doc_tokens: 32}]")
    plan.run(composed("plan", "method=longspec", *base, "trainer.accelerator=cuda"))
    assert tables[-1][0]["hours"] > 0 and "written first" not in capsys.readouterr().out
    answers = ("data.prompt_tokens=[8,16]", "data.answers=target")
    plan.run(composed("plan", "method=longspec", *base, *answers, "trainer.accelerator=cpu"))
    assert not {"hours", "step_s", "tokens_per_s", "fits"} & set(tables[-1][0])
    said = capsys.readouterr().out
    assert "No times" in said and "fits:" not in said and "written first, by prepare" in said


SHAPE = (
    "target.path=null", "target.shape={n_layers: 80, n_heads: 64, n_kv_heads: 8, head_dim: 128, tied: false, "
    "hidden_size: 8192, intermediate_size: 28672, vocab_size: 128256, max_positions: 131072}",
)  # fmt: skip
LONG = "+recipe=longspec_llama8b_long"


def planned(composed, tmp_path, *words):
    """The JSON of a plan at 70B shape."""
    plan.run(composed("plan", LONG, *SHAPE, f"json={tmp_path / 'plan.json'}", *words))
    return json.loads((tmp_path / "plan.json").read_text())


def test_what_does_not_fit_is_told_with_what_does(composed, tmp_path, capsys):
    found = planned(composed, tmp_path)
    said = capsys.readouterr().out
    assert found["stages"][0]["fits"] == "no" and found["stages"][0]["mostly"] == "the target's weights"
    assert "do not fit" in said and "This fits: trainer=ddp trainer.devices=2 target.shard=fsdp2" in said
    again = planned(composed, tmp_path, *found["advice"]["words"], "trainer.accelerator=cuda")
    (row,) = again["stages"]
    assert row["fits"] == "yes" and again["advice"] is None
    assert row["memory_bytes"]["peak"] == found["advice"]["peak_bytes"] < 120e9  # issue: at most 120 GB a GPU
    assert 32768 < row["largest_sequence_tokens"] <= 2**22 and again["layout"]["shard"]


@pytest.mark.parametrize("recipe", PATTERNED)
def test_patterns_of_recipes_match_what_they_train(composed, recipe):
    """At the published shape; `trained` refuses others."""
    found = run_plan.RunPlan(composed("train", f"+recipe={recipe}", "target.path=null"))
    assert found.cfg.optim.lr_multipliers and found.moments > found.trained


def test_muon_stores_one_moment_of_a_matrix(composed, tmp_path):
    """All of LongSpec's weights but its three norms are matrices that Muon trains."""
    adamw, muon = (planned(composed, tmp_path, f"optim={name}") for name in ("adamw", "muon"))
    trained = adamw["method"]["trained"]
    saved = [one["disk_bytes"]["checkpoint"] for one in (adamw, muon)]
    assert saved == [12 * trained, 8 * trained + 4 * 3 * 8192]
    held = [one["stages"][0]["memory_bytes"]["trained"] for one in (adamw, muon)]
    assert held[0] - held[1] == saved[0] - saved[1]


def test_a_setting_whose_ranks_cannot_share_the_rows_is_not_proposed(composed, tmp_path, capsys):
    assert planned(composed, tmp_path, "trainer.sequences_per_step=3")["advice"] is None
    assert "that can share trainer.sequences_per_step=3 evenly" in capsys.readouterr().out


def test_every_figure_has_its_assumption_in_the_json(composed, tmp_path):
    words = ("trainer=deepspeed_zero2", "trainer.devices=8", "trainer.num_nodes=2")
    found = planned(composed, tmp_path, *words, "trainer.strategy.offload_optimizer=true")
    assert (found["layout"]["zero"], found["layout"]["offload"], found["layout"]["nodes"]) == (2, True, 2)
    assert found["stages"][0]["sequences_per_step"] == 256
    assert found["stages"][0]["seconds"]["step_s"] > sum(found["stages"][0]["seconds"].values()) / 3
    assert found["disk_bytes"]["checkpoint"] == 12 * found["method"]["trained"]
    assert {"linear_share", "link_share", "context_bytes", "zero_bucket_bytes"} <= found["assumptions"].keys()


def test_stored_features_take_room_on_the_disk_and_the_layers_none_on_the_gpu(composed, tmp_path):
    bf16 = planned(composed, tmp_path, "features=fill", "method.objective=kl")["disk_bytes"]
    assert bf16["features_a_token"] == 2 * (2 * 8 * 128 + 8192)  # K, V and the LM head's input
    lean = ("features.form=int8", "features.top_k=64", "method.objective=kl")
    found = planned(composed, tmp_path, "features=offline", *lean)
    assert found["disk_bytes"]["features_a_token"] == 2 * 8 * (128 + 2) + 64 * (3 + 2)
    (row,) = found["stages"]
    assert row["memory_bytes"]["target"] == 2 * 2 * 128256 * 8192 and row["fits"] == "yes"
    assert row["seconds"]["target_s"] == 0 < row["seconds"]["module_s"]
    (tmp_path / "kept").mkdir()
    Identity("x", "", "excerpt", "", Form("int8", 64)).write(tmp_path / "kept")
    folder = f"features.folder={tmp_path / 'kept'}"
    as_there = planned(composed, tmp_path, "features=offline", folder, "method.objective=kl")["disk_bytes"]
    assert as_there["features_a_token"] == found["disk_bytes"]["features_a_token"]
    with pytest.raises(ConfigError, match="method=lookaheadkv watches every layer"):
        plan.run(composed("plan", "+recipe=lookaheadkv_llama8b", "target.path=null", "features=fill"))


def test_deepspeeds_own_configuration_is_read(composed, tmp_path):
    own = tmp_path / "zero.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    words = ("trainer=deepspeed_zero1", "trainer.devices=2", f"+trainer.strategy.config={own}")
    layout = planned(composed, tmp_path, *words)["layout"]
    assert (layout["zero"], layout["offload"], layout["bucket"]) == (2, True, 500_000_000)
    own.write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match="stage 3 cannot train here; allowed"):
        planned(composed, tmp_path, *words)
    own.unlink()
    with pytest.raises(ConfigError, match=r"config=.* cannot be read .*; allowed: a mapping or a JSON file"):
        planned(composed, tmp_path, *words)


def test_gpus_that_are_not_here_must_be_counted(composed, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"devices=auto means the GPUs of this machine, .*devices=8"):
        planned(composed, tmp_path, "trainer=ddp")
    assert planned(composed, tmp_path, "trainer=ddp", "trainer.devices=8")["layout"]["devices"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.devices=3", "trainer.sequences_per_step=256"], "a multiple of 3, the number of ranks"),
        (["trainer.sequences_per_step=abc"], "trainer.sequences_per_step=abc; allowed: a whole number"),
        (
            ["trainer.sequences_per_step=null", "trainer.accumulate_grad_batches=0"],
            "accumulate_grad_batches=0",
        ),
        (["trainer=deepspeed_zero3"], "stage 3 cannot train here; allowed: trainer=deepspeed_zero1"),
        (["trainer.strategy=fsdp"], "would split the trained module"),
        (["trainer=deepspeed_zero2", "optim=muon"], "optim.name=muon needs whole matrices"),
        (["trainer=deepspeed_zero2", "trainer.precision=16-mixed"], "16-mixed with DeepSpeed; allowed"),
        (
            ["trainer=deepspeed_zero2", "trainer.devices=2", "trainer.strategy.offload_optimizer=maybe"],
            "trainer.strategy.offload_optimizer=maybe; allowed",
        ),
        (["trainer.devices=[]"], r"trainer.devices=\[\]; allowed: a whole number"),
        (["trainer.sequences_per_step=8", "trainer.accumulate_grad_batches=4"], "are both set; give one"),
        (["trainer=deepspeed_zero2", "trainer.strategy.stage=two"], "stage two cannot train here; allowed"),
        (["trainer.devices=0"], "trainer.devices=0"),
        (["target.shard=fsdp2", "trainer.devices=1"], "trainer.devices is 1"),
        (["data.stages=[]"], "data.stages is empty"),
    ],
)
def test_what_it_refuses(composed, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        planned(composed, tmp_path, *words)


def test_a_target_that_is_not_here_is_planned_by_its_shape_and_this_is_told(composed, capsys):
    plan.run(composed("plan", "+recipe=longspec_llama8b_long", "target.path=/no/such/folder"))
    assert "(by target.shape: no config.json of it is here)" in capsys.readouterr().out
    plan.run(composed("plan", "+recipe=longspec_tiny"))
    assert "by target.shape" not in capsys.readouterr().out
