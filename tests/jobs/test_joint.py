"""Joint training from the command line's keys on: beside each member alone, cut short, exported, planned."""

from __future__ import annotations

import fnmatch
import json
import os
import signal

import pytest
import torch

from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.errors import ArtifactError, ConfigError
from longtrain.jobs import bench, export, plan, train
from longtrain.jobs.planning import run_plan
from longtrain.methods.joint.objective import JointObjective
from longtrain.targets.loading import load_target
from longtrain.training import checkpoint, table

LONGSPEC = {"window": 8, "max_depth": 2, "chunk_tokens": 32}
EAGLE3 = {"draft_vocab_size": 64, "depths": 2, "layers": "[0,1]", "chunk_tokens": 32, "window": 7}
LOOKAHEADKV = {"n_lookahead": 4, "lora_rank": 2, "embedding_lr_scale": 3.0}
ALL = {"longspec": LONGSPEC, "eagle3": EAGLE3, "lookaheadkv": LOOKAHEADKV}


def members(*names):
    return [
        *(f"method.members.{name}.{key}={value}" for name in names for key, value in ALL[name].items()),
        *(f"method.members.{name}=null" for name in ALL if name not in names),
    ]


@pytest.fixture
def words(text):
    """Prompts of running text and what follows them as answers."""
    for number in range(8):
        story = " ".join(f"{number} owls and {n} foxes" for n in range(40))
        (text / f"story{number}.txt").write_text(story)
    return [
        "data=text",
        f"data.text={text}",
        "data.prompt_tokens=[20,48]",
        "data.answer_tokens=12",
        "data.answers=source",
        "data.long_documents=truncate",
        "data.min_doc_tokens=8",
        "data.val_fraction=0.2",
        "data.val_sequences=2",
        "data.stages=[{fraction: 1.0, sequence_tokens: 128, doc_tokens: 64}]",
        "trainer=cpu",
        "trainer.max_steps=4",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_every=2",
        "trainer.gradient_clip_val=0.1",
        "callbacks.progress=false",
        "callbacks.curves=false",
    ]


@pytest.fixture
def trained(composed, words, tmp_path):
    """`trained(name, *overrides)`: the folder of a run that has trained."""

    def make(name, *overrides):
        train.run(composed("train", *words, *overrides, f"name={name}"))
        return tmp_path / "runs" / name / "train"

    return make


def weights(folder):
    return checkpoint.trained_tensors(folder / "checkpoints" / "last.ckpt")


def test_two_members_train_as_each_alone_to_the_digit(trained):
    """Labels are counted by both, so nothing is scaled; each is clipped by its own norm."""
    both = trained("both", "method=joint", *members("longspec", "eagle3"), "method.lr_scales.eagle3=0.5")
    rows = table.read(both / "metrics.csv")
    for name, rate in (("longspec", 5e-4), ("eagle3", 2.5e-4)):
        keys = [f"method.{key}={value}" for key, value in ALL[name].items()]
        one = trained(name, f"method={name}", *keys, f"optim.lr={rate}")
        alone, together = weights(one), weights(both)
        assert alone.keys() == {key.partition(".")[2] for key in together if key.startswith(f"{name}.")}
        assert all(torch.equal(together[f"{name}.{key}"], value) for key, value in alone.items())
        for its, mine in zip(table.read(one / "metrics.csv"), rows, strict=True):
            for kind in ("train", "val"):
                for key in ("loss", "accuracy", "acc/depth_1"):
                    assert its[f"{kind}/{key}"] == mine[f"{kind}/{name}/{key}"]
            assert its["train/grad_norm"] == mine[f"train/{name}/grad_norm"]
    assert {row["step"] for row in rows if row["val/loss"]} == {"2", "4"}


def test_three_members_cut_short_resume_bit_for_bit_and_are_three_artifacts(
    trained, composed, tmp_path, target_folder, monkeypatch
):
    three = ["method=joint", *members(*ALL)]
    whole = trained("whole", *three)
    original, calls = JointObjective.forward, []

    def forward(self, batch):
        if self.training:
            calls.append(batch)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(JointObjective, "forward", forward)
        with pytest.raises(SystemExit):
            trained("one", *three)
    cut = trained("one", *three)
    for file in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        a, b = (checkpoint.read(run / "checkpoints" / "last.ckpt").tensors(file) for run in (whole, cut))
        assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
    assert (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"method.members.longspec.window: 8 -> 9"):
        trained("one", *three, "method.members.longspec.window=9")

    export.run(composed("export"))
    target = load_target(target_folder)
    for name, keys in (("longspec", {}), ("eagle3", {}), ("lookaheadkv", {"budget_tokens": 8})):
        artifact = Artifact.load(f"one/{name}", home=tmp_path)
        assert artifact.method == name and artifact.provenance["step"] == 4
        assert all(
            torch.equal(weights(cut)[f"{name}.{key}"], value) for key, value in artifact.tensors.items()
        )
        engine = Engine(target, artifact.attach(target, **keys))
        assert len(engine.generate([list(range(2, 40))], max_new_tokens=4, ignore_eos=True).tokens[0]) == 4
    with pytest.raises(
        ArtifactError, match=r"holds an artifact for each of eagle3, longspec, lookaheadkv; name"
    ):
        Artifact.load("one", home=tmp_path)
    with pytest.raises(ConfigError, match=r"trained longspec, eagle3, lookaheadkv; leave format out"):
        export.run(composed("export", "format=flat"))


def test_deepspeed_cannot_clip_members_apart(composed):
    zero = ["method=joint", "trainer=deepspeed_zero1"]
    with pytest.raises(ConfigError, match=r"pass trainer=ddp, or trainer.gradient_clip_val=null"):
        run_plan.check_strategy(composed("train", *zero))
    run_plan.check_strategy(composed("train", *zero, "trainer.gradient_clip_val=null"))
    run_plan.check_strategy(composed("train", "method=eagle3", "trainer=deepspeed_zero1"))


def test_plan_and_bench_know_it(composed, words, tmp_path):
    plan.run(composed("plan", *words, "method=joint", *members(*ALL), f"json={tmp_path / 'plan.json'}"))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["method"]["members"]["eagle3"]["depths"] == 2 and found["stages"][0]["chunk"] == 32
    short = ["lengths=[128]", "suite.repeats=1", "suite.min_repeats=1", "suite.warmup=0"]
    bench.run(composed("bench", "suite=training", "method=joint", *members(*ALL), *short))
    (row,) = json.loads((tmp_path / "runs/one/bench/training.json").read_text())["rows"]
    assert row["step"]["tokens_per_s"] > 0 and row["response_tokens"] == 64


def test_stored_features_serve_the_drafts_and_not_what_watches_a_pass(trained, tmp_path):
    """The shared pass is stored once; reading it gives the run that wrote it."""
    drafts = ["method=joint", *members("longspec", "eagle3"), f"features.folder={tmp_path / 'kept'}"]
    one, other = (trained(mode, *drafts, f"features={mode}") for mode in ("fill", "offline"))
    assert (one / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()
    three = ["method=joint", *members(*ALL), f"features.folder={tmp_path / 'others'}", "features=fill"]
    with pytest.raises(ConfigError, match="watches every layer of the target, and that is not stored"):
        trained("three", *three)


@pytest.mark.slow
def test_the_recipe_for_published_weights_teaches_all_three_with_muon(composed, words, tmp_path):
    """Its values as they are, sizes aside: its patterns match, and each draft's loss falls."""
    sizes = {
        "longspec": {"window": 8, "chunk_tokens": 32},
        "eagle3": {"draft_vocab_size": 64, "layers": "[0,1]", "window": 8, "chunk_tokens": 32},
        "dspark": {
            "draft_vocab_size": 64, "layers": "[0]", "n_kv_heads": 4, "windows": "[5,5,5,null,null]",
            "chunk_tokens": 64, "mask_token": 0,
        },
    }  # fmt: skip
    fit = [
        f"method.members.{name}.{key}={value}" for name, keys in sizes.items() for key, value in keys.items()
    ]
    fit += [f"method.members.{name}.offset_max_tokens=2048" for name in sizes]
    long = ["trainer.max_steps=16", "trainer.sequences_per_step=2", "trainer.accumulate_grad_batches=1"]
    long += ["trainer.log_every=1", "trainer.val_every=0", "trainer.gradient_clip_val=1.0"]
    cfg = composed("train", "+recipe=joint_qwen25_coder", *words, *fit, *long)
    train.run(cfg)
    assert cfg.optim.name == "muon"
    heads = {name for name in weights(tmp_path / "runs/one/train") if fnmatch.fnmatch(name, "*.lm_head*")}
    assert heads == {"eagle3.lm_head.weight", "dspark.lm_head.weight"}
    rows = table.read(tmp_path / "runs/one/train/metrics.csv")
    for name in sizes:
        losses = [float(row[f"train/{name}/loss"]) for row in rows]
        assert sum(losses[-4:]) < sum(losses[:4])
