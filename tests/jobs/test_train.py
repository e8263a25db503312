"""The train job on a random micro target and a real LongSpec draft."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from longtrain.config import RunConfig
from longtrain.errors import ArtifactError, ConfigError
from longtrain.jobs import loggers, train
from longtrain.training import checkpoint, table

WORDS = "the quick brown fox jumps over a lazy dog while seven clever owls watch from an old oak".split()  # noqa: SIM905


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    from longtrain.targets.loading import random_target
    from longtrain.targets.shapes import SHAPES
    from longtrain.targets.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("target")
    model = random_target({**SHAPES["llama_micro"], "vocab_size": 300}, seed=0)
    model.model.save_pretrained(folder)
    train_tokenizer(_texts(200), folder, size=300, max_positions=model.info.max_positions)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number, text in enumerate(_texts(12)):
        (folder / f"story{number}.txt").write_text(text)
    return folder


def _texts(count):
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        picks = torch.randint(len(WORDS), (150,), generator=generator).tolist()
        yield " ".join(WORDS[pick] for pick in picks) + f" {number}."


@pytest.fixture
def compose(tmp_path, target_folder, text_folder):
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from longtrain.assets import asset_dir
    from longtrain.cli import mount

    def make(*overrides, name="toy", method="longspec"):
        GlobalHydra.instance().clear()
        mount()
        with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
            cfg = compose(
                "train",
                overrides=[
                    f"name={name}",
                    f"home={tmp_path}",
                    "quiet=true",
                    f"target.path={target_folder}",
                    f"method={method}",
                    "method.window=8",
                    "data=text",
                    f"data.text={text_folder}",
                    "data.stages=[{fraction: 1.0, sequence_tokens: 96, doc_tokens: 64}]",
                    "data.min_doc_tokens=8",
                    "data.val_fraction=0.2",
                    "data.val_sequences=2",
                    "trainer=cpu",
                    "trainer.max_steps=4",
                    "trainer.accumulate_grad_batches=2",
                    "trainer.val_every=2",
                    "callbacks.progress=false",
                    *overrides,
                ],
            )
        return RunConfig.from_hydra(cfg)

    return make


def test_a_run_leaves_all_that_it_should(compose, tmp_path, drawn):
    train.run(compose())
    folder = tmp_path / "runs" / "toy" / "train"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "curves.png",
        "metrics.csv",
        "provenance.json",
        "speed.csv",
        "summary.json",
    ]
    rows = table.read(folder / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]
    assert all(float(row["train/loss"]) > 0 for row in rows if row["train/loss"]) and rows[-1]["val/loss"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["method"]["window"] == 8
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["data"]["sha256"] and facts["target"]["weights"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["tokens"] == 4 * 2 * 96 and summary["final_loss"] > 0
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    names = checkpoint.trained_tensors(folder / "checkpoints" / "last.ckpt")
    assert "cross_attn.q_proj.weight" in names and not [name for name in names if "target" in name]


@pytest.mark.parametrize("begin", [train.check, train.run])
def test_a_pattern_that_matches_nothing_is_told_before_data_are_prepared(compose, tmp_path, begin):
    says = r"'q_porj\*' matches no trainable parameter; nearest of \d+: \S*q_proj\.weight"
    with pytest.raises(ConfigError, match=says):
        begin(compose("+optim.lr_multipliers={q_porj*: 0.5}"))
    assert not (tmp_path / "data").exists()


def test_so_it_is_where_the_target_itself_is_trained(composed):
    with pytest.raises(ConfigError, match=r"'q_porj\*' matches no trainable parameter"):
        train.check(composed("train", "method=pretrain", "optim.lr_multipliers={q_porj*: 0.5}"))


def test_a_longspec_run_cut_short_resumes_bit_for_bit(compose, tmp_path):
    """Shifts are drawn."""
    from longtrain.methods.longspec.objective import LongSpecObjective

    train.run(compose(name="whole"))
    original, calls = LongSpecObjective.forward, []

    def forward(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    LongSpecObjective.forward = forward
    try:
        with pytest.raises(SystemExit) as left:
            train.run(compose(name="cut"))
    finally:
        LongSpecObjective.forward = original
    assert left.value.code == 128 + signal.SIGTERM == 143
    folders = [tmp_path / "runs" / name / "train" for name in ("whole", "cut")]
    assert checkpoint.read(folders[1] / "checkpoints" / "last.ckpt").step == 2
    train.run(compose(name="cut"))
    assert folders[0].joinpath("metrics.csv").read_bytes() == folders[1].joinpath("metrics.csv").read_bytes()
    whole, cut = (checkpoint.trained_tensors(folder / "checkpoints" / "last.ckpt") for folder in folders)
    assert all(torch.equal(whole[key], cut[key]) for key in whole) and set(whole) == set(cut)


def test_a_second_run_of_one_name_is_refused_while_the_first_goes_on(compose, tmp_path):
    from longtrain.files import lock

    run_dir = tmp_path / "runs" / "toy"
    with lock(run_dir / ".train.lock") as held:
        assert held
        with pytest.raises(
            ConfigError, match=r"name=toy is being trained by another process .*pass name=OTHER"
        ):
            train.run(compose())
        assert [path.name for path in run_dir.iterdir()] == [".train.lock"]
    seen = []

    class Second(Callback):
        def on_train_batch_start(self, *_):
            with lock(run_dir / ".train.lock") as held:
                seen.append(held)

    cfg = compose()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loggers, "instances", lambda values: [Second()] if values is cfg.callbacks.get("extra") else []
        )
        train.run(cfg)
    assert seen and not any(seen)
    with lock(run_dir / ".train.lock") as held:
        assert held


def test_an_eagle3_draft_takes_its_vocabulary_from_the_data_and_goes_on_with_it(compose, tmp_path):
    """The frozen head is in the checkpoint too: the module can be built from that alone."""
    keys = ("method.draft_vocab_size=12", "method.depths=3", "method.head=frozen", "optim=muon")
    train.run(compose(*keys, method="eagle3"))
    folder = tmp_path / "runs" / "toy" / "train"
    weights = checkpoint.trained_tensors(folder / "checkpoints" / "last.ckpt")
    facts = json.loads((folder / "provenance.json").read_text())["data"]["draft_vocabulary"]
    assert facts["tokens"] == len(weights["draft_ids_K"]) == len(weights["lm_head.weight"]) == 12
    assert 0.1 < facts["coverage"] < 1 and weights["draft_ids_K"].tolist() != list(range(12))
    rows = table.read(folder / "metrics.csv")
    assert float(rows[-1]["val/tau"]) >= 1 and rows[-1]["val/acc/depth_2"] is not None
    train.run(compose(*keys, method="eagle3"))  # nothing is left to do, and nothing differs
    again = checkpoint.trained_tensors(folder / "checkpoints" / "last.ckpt")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_the_last_line_leaves_out_what_was_not_measured():
    summary = {"steps": 2, "tokens": 2560, "final_loss": 2.74751, "final": {}, "tokens_per_s": 14644.3}
    assert train._outcome(summary) == "steps=2 tokens=2560 loss=2.7475 tokens_per_s=14644"
    validated = {**summary, "final": {"val/loss": 3.12159}}
    assert train._outcome(validated) == "steps=2 tokens=2560 loss=2.7475 val_loss=3.1216 tokens_per_s=14644"


def test_changed_settings_are_not_resumed_but_harmless_ones_are(compose):
    train.run(compose())
    with pytest.raises(ConfigError, match=r"optim.lr: 0.0005 -> 0.001"):
        train.run(compose("optim.lr=1e-3"))
    with pytest.raises(ConfigError, match=r"method.window: 8 -> 16"):
        train.run(compose("method.window=16"))
    train.run(compose("trainer.log_every=1", "callbacks.curves=false"))
    train.run(compose("optim.lr=1e-3", "resume=never"))


def test_a_refused_resume_leaves_the_run_as_it_was(compose, tmp_path):
    train.run(compose("trainer.max_steps=1"))
    files = [tmp_path / "runs/toy/train" / name for name in ("config.yaml", "provenance.json")]
    before = [file.read_bytes() for file in files]
    with pytest.raises(ConfigError, match=r"method.window: 8 -> 16"):
        train.run(compose("trainer.max_steps=1", "method.window=16"))
    assert [file.read_bytes() for file in files] == before


def test_training_may_start_from_an_artifact(compose, tmp_path):
    from longtrain.artifact import Artifact
    from longtrain.jobs.setup import load_target
    from longtrain.methods.longspec.config import Config

    cfg = compose()
    train.run(cfg)
    target = load_target(cfg.target, seed=cfg.seed)
    from longtrain import methods

    config = Config(window=8)
    module = methods.get("longspec").build(config, target.info)
    module.load_state_dict(checkpoint.trained_tensors(tmp_path / "runs/toy/train/checkpoints/last.ckpt"))
    Artifact.from_module("longspec", config, module=module, target=target).save(
        tmp_path / "checkpoints" / "one"
    )
    train.run(compose("init=one", "trainer.max_steps=1", "optim.lr=1e-12", "trainer.val_every=0", name="two"))
    after = checkpoint.trained_tensors(tmp_path / "runs/two/train/checkpoints/last.ckpt")
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)
    with pytest.raises((ArtifactError, ConfigError), match="no artifact"):
        train.run(compose("init=absent", name="three"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.accumulate_grad_batches=0", "accumulate_grad_batches=0"),
        ("+trainer.max_step=3", r"unknown key 'trainer.max_step'; known: max_steps"),
        ("+optim.learning_rate=3", r"unknown key 'optim.learning_rate'"),
        ("optim.lr=fast", "optim.lr=fast; allowed: a number"),
        ("optim.betas=[0.9]", r"optim.betas=\[0.9\]; allowed: a list of 2"),
        ("optim.betas=[0.9,1.0]", r"optim.betas=\[0.9, 1.0\]; allowed: two numbers"),
        ("trainer.max_steps=many", "trainer.max_steps=many; allowed: a whole number, 1 or more, or null"),
        ("trainer.log_every=null", "trainer.log_every=null; allowed: a whole number"),
        ("trainer.sequences_per_step=4", "sequences_per_step=4 .*accumulate_grad_batches=2 .*are both set"),
        ("optim.schedule=cosin", r"optim.schedule=cosin; allowed: cosine, linear, constant"),
        (
            "data.stages=[{steps: 2, sequence_tokens: 96, doc_tokens: 64}]",
            r"stages hold 2 optimizer steps.*=4 asks",
        ),
    ],
)
def test_wrong_settings_are_one_clear_line(compose, override, message):
    with pytest.raises(ConfigError, match=message) as error:
        train.run(compose(override))
    assert "\n" not in str(error.value)


def test_rows_per_step_are_of_all_ranks(tmp_path):
    from longtrain.training.loop import build_trainer
    from longtrain.training.settings import LoopConfig

    for devices in (1, 2):
        loop = LoopConfig(sequences_per_step=8, accelerator="cpu", devices=devices, precision="32-true")
        trainer = build_trainer(loop, tmp_path)
        assert trainer.world_size == devices and trainer.accumulate_grad_batches == 8 // devices
    with pytest.raises(ConfigError, match="sequences_per_step=7; allowed: a multiple of 2"):
        LoopConfig(sequences_per_step=7).sequences_of_a_rank(2)


def test_rows_per_step_train_like_accumulated_rows(compose, tmp_path):
    train.run(compose())
    train.run(compose("trainer.sequences_per_step=2", "trainer.accumulate_grad_batches=1", name="same"))
    first, second = (tmp_path / "runs" / name / "train" / "metrics.csv" for name in ("toy", "same"))
    assert first.read_bytes() == second.read_bytes()


def test_the_length_may_come_from_the_data(compose, tmp_path):
    train.run(
        compose("trainer.max_steps=null", "data.stages=[{steps: 3, sequence_tokens: 96, doc_tokens: 64}]")
    )
    assert json.loads((tmp_path / "runs/toy/train/summary.json").read_text())["steps"] == 3


@pytest.mark.parametrize("debug", ["smoke", "overfit", pytest.param("profile", marks=pytest.mark.slow)])
def test_debug_groups_run(compose, tmp_path, debug):
    extra = {"overfit": ["trainer.max_steps=40", "optim.lr=0.02"], "profile": ["trainer.max_steps=5"]}
    for _ in range(2 if debug == "smoke" else 1):  # again: the first run's files are in the way of none
        train.run(compose(f"+debug={debug}", *extra.get(debug, [])))
    rows = [row for row in table.read(tmp_path / "runs/toy/train/metrics.csv") if row["train/loss"]]
    if debug == "overfit":
        assert float(rows[-1]["train/loss"]) < 0.6 * float(rows[0]["train/loss"])
    if debug == "profile":
        assert list((tmp_path / "runs" / "toy" / "train" / "profile").glob("*.json"))


def test_the_id_on_a_server_is_the_runs_own_and_stays(compose, tmp_path):
    def drawn(name, *, anew=False):
        cfg = compose("logger=wandb", name=name)
        cfg = loggers.with_wandb_id(cfg, tmp_path / name, anew=anew)
        return cfg.loggers["wandb"]["id"]

    first = drawn("a")
    assert first == drawn("a") != drawn("b") and drawn("a", anew=True) != first


@pytest.mark.slow
def test_loggers_by_config(compose, tmp_path):
    train.run(compose("logger=tensorboard"))
    assert list((tmp_path / "runs/toy/train/tensorboard").glob("events.out.*"))
    train.run(compose("logger=wandb", "logger.wandb.offline=true", name="w"))
    assert list((tmp_path / "runs/w/train/wandb").glob("offline-run-*"))


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_logger_names_its_extra_before_anything_is_loaded(compose, name, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    with pytest.raises(
        ConfigError, match=rf"logger={name} needs .*pip install 'longtrain\[{name}\]'"
    ) as error:
        train.check(compose(f"logger={name}"))
    assert "\n" not in str(error.value)
    train.check(compose("logger=csv"))


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_names_its_extra(compose, stage, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'longtrain\[deepspeed\]'"):
        train.run(compose(f"trainer=deepspeed_zero{stage}"))


def test_zero3_is_refused_with_what_to_use_before_anything_is_loaded(compose):
    with pytest.raises(ConfigError, match=r"trainer=deepspeed_zero2; .*target.shard=fsdp2") as error:
        train.run(compose("trainer=deepspeed_zero3", "target.path=absent"))
    assert "\n" not in str(error.value)


def test_every_trainer_option_gives_known_keys():
    from dataclasses import fields

    from longtrain.assets import asset_dir
    from longtrain.training.optim import Optim
    from longtrain.training.settings import LoopConfig

    for group, kind in (("trainer", LoopConfig), ("optim", Optim)):
        for file in Path(asset_dir("conf"), group).glob("*.yaml"):
            keys = set(yaml.safe_load(file.read_text())) - {"defaults"}
            assert keys <= {field.name for field in fields(kind)}, file
    full = set(yaml.safe_load(Path(asset_dir("conf"), "trainer", "auto.yaml").read_text()))
    assert full == {field.name for field in fields(LoopConfig)}
