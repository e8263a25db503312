import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import lightning
import pytest
import torch
from torch import nn

from longtrain.errors import ArtifactError, ConfigError, DataError, TrainingError
from longtrain.methods.spec import Loss
from longtrain.training import checkpoint, table
from longtrain.training.module import TrainModule
from longtrain.training.optim import Optim

from . import toy

PLAIN = Optim(lr=0.1, warmup_steps=0, schedule="constant", weight_decay=0.0)


def weights(objective):
    return torch.cat([p.detach().flatten() for p in objective.module.parameters()])


def test_accumulation_gives_the_gradient_of_the_mean_over_all_labels(tmp_path):
    """Four rows with different label counts in one step: as if they were one big batch."""
    draft = toy.Draft()
    start = toy.Toy(toy.Draft())
    total, labels = 0.0, 0
    for index in range(4):
        ids_T, mask_T = toy.row(index)
        batch = toy.Batch(ids_T, (0, len(ids_T)), mask_T, seed=index, tokens_in_step=1)
        loss = toy.Toy(draft)(batch)
        total, labels = total + loss.total, labels + loss.tokens
    (total / labels).backward()
    norm = nn.utils.clip_grad_norm_(draft.parameters(), float("inf"))
    _, trained = toy.train(
        tmp_path, steps=1, objective=toy.Toy(toy.Draft()), gradient_clip_val=None, optim=PLAIN, val_every=0
    )
    row = table.read(tmp_path / "metrics.csv")[0]
    assert float(row["train/loss"]) == pytest.approx(float((total / labels).detach()), rel=1e-6)
    assert float(row["train/grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    expected = torch.optim.AdamW(draft.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    expected.step()
    torch.testing.assert_close(
        weights(trained), torch.cat([p.detach().flatten() for p in draft.parameters()])
    )
    assert not torch.equal(weights(trained), weights(start))


def test_gradients_are_clipped_and_the_norm_before_is_logged(tmp_path):
    toy.train(tmp_path / "a", steps=1, val_every=0, gradient_clip_val=None, optim=PLAIN)
    toy.train(tmp_path / "b", steps=1, val_every=0, gradient_clip_val=1e-3, optim=PLAIN)
    free, clipped = (table.read(tmp_path / name / "metrics.csv")[0]["train/grad_norm"] for name in "ab")
    assert free == clipped


def test_only_trained_tensors_are_saved_and_all_of_them_are_expected(tmp_path):
    toy.train(tmp_path, steps=2)
    last = tmp_path / "checkpoints" / "last.ckpt"
    draft = toy.Draft()
    assert set(checkpoint.trained_tensors(last)) == {name for name, _ in draft.named_parameters()}
    names = set(checkpoint.read(last).tensors(checkpoint.OPTIMIZER))
    assert names == {
        f"{name}.{key}" for name, _ in draft.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")
    }
    wider = toy.Draft()
    wider.out, wider.more = nn.Linear(toy.HIDDEN, toy.VOCAB, bias=False), nn.Linear(2, 2, bias=False)
    with pytest.raises(ArtifactError, match=r"missing \['more.weight'\], unknown \['out.bias'\]"):
        toy.train(tmp_path / "b", steps=2, objective=toy.Toy(wider), resume=str(last))


def test_training_lowers_the_loss_and_leaves_the_target_alone(tmp_path):
    summary, objective = toy.train(tmp_path, steps=60, optim=Optim(lr=0.05))
    rows = [row for row in table.read(tmp_path / "metrics.csv") if row["val/loss"]]
    assert float(rows[-1]["val/loss"]) < 0.85 * float(rows[0]["val/loss"])
    assert torch.equal(objective.target.weight, torch.full((1000,), 0.5))
    assert summary["steps"] == 60 and summary["documents"] == 240 and summary["peak_memory_bytes"] > 0


def test_reading_the_device_rarely_changes_no_figure(tmp_path):
    toy.train(tmp_path / "a", log_every=1)
    toy.train(tmp_path / "b", log_every=100)
    assert (tmp_path / "a/metrics.csv").read_bytes() == (tmp_path / "b/metrics.csv").read_bytes()


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_nan_loss_names_step_documents_and_last_good_checkpoint(tmp_path, log_every):
    with pytest.raises(TrainingError) as error:
        toy.train(
            tmp_path,
            steps=12,
            log_every=log_every,
            checkpoint_every_steps=4,
            objective=toy.Toy(toy.Draft(), nan_at=26),  # row 26 of 4 a step: step 7
        )
    text = str(error.value)
    assert "loss is nan at step 7" in text and "documents: doc26)" in text
    assert f"last good checkpoint: {tmp_path}/checkpoints/last.ckpt (step 4)" in text
    assert [row["step"] for row in table.read(tmp_path / "metrics.csv")][-1] == "6"


def test_a_checkpoint_is_never_taken_of_poisoned_weights(tmp_path):
    with pytest.raises(TrainingError, match=r"step 7 .*no checkpoint was saved before"):
        toy.train(
            tmp_path,
            log_every=100,
            checkpoint_every_steps=8,
            val_every=0,
            objective=toy.Toy(toy.Draft(), nan_at=26),
        )
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_step_without_labels_and_data_that_ends_are_errors(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"ended after step 5 of trainer.max_steps=9"):
        toy.train(tmp_path, steps=9, data_steps=5)
    monkeypatch.setattr(toy, "row", lambda index: (torch.zeros(4, dtype=torch.long), torch.zeros(4).bool()))
    with pytest.raises(DataError, match=r"step 1 has no supervised token.*doc0"):
        toy.train(tmp_path / "b", steps=2)


def test_settings_that_lightning_refuses_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="precision"):
        toy.train(tmp_path, precision="bf17-mixed")
    with pytest.raises(ConfigError, match="max_steps=0"):
        toy.train(tmp_path, steps=0)


def test_loggers_get_every_step_and_the_speed(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    toy.train(tmp_path, steps=6, loggers=[CSVLogger(tmp_path, name="log", version="")])
    rows = table.read(tmp_path / "log" / "metrics.csv")
    assert {row["step"] for row in rows} == {str(step) for step in range(1, 7)}
    assert any(row["speed/tokens_per_s"] for row in rows)


def test_a_monitoring_callback_sees_held_out_figures(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping

    summary, _ = toy.train(
        tmp_path, steps=40, callbacks=[EarlyStopping("val/loss", patience=1, min_delta=100.0)]
    )
    assert summary["steps"] == 8


TWO = ["accumulate=2", "devices=2", 'strategy="ddp"']


def program(folder, *settings):
    env = {**os.environ, "PYTHONPATH": str(Path(toy.__file__).parents[2])}
    return subprocess.Popen([sys.executable, toy.__file__, str(folder), "noise=false", *settings], env=env)


def metrics(folder):
    return [
        {key: pytest.approx(float(value), rel=1e-5) for key, value in row.items() if value}
        for row in table.read(folder / "metrics.csv")
    ]


@pytest.mark.slow
def test_two_processes_train_as_one_and_take_over_from_one(tmp_path):
    """Rows of a step over 1 x 4 and over 2 ranks x 2: the same figures, also when that changes on resume."""
    common = ["steps=6", "checkpoint_every_steps=3"]
    assert program(tmp_path / "one", *common).wait() == 0
    assert program(tmp_path / "two", *common, *TWO).wait() == 0
    shutil.copytree(tmp_path / "one", tmp_path / "mixed")
    last = tmp_path / "mixed/checkpoints/previous.ckpt"
    assert checkpoint.read(last).step == 3
    assert program(tmp_path / "mixed", *common, *TWO, f'resume="{last}"').wait() == 0
    one, two, mixed = (table.read(tmp_path / name / "metrics.csv") for name in ("one", "two", "mixed"))
    assert len(one) == 7
    numbers = [{key: float(value) for key, value in row.items() if value} for row in one]
    assert numbers == metrics(tmp_path / "two") == metrics(tmp_path / "mixed")
    assert two[-1].keys() == mixed[-1].keys()


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both(tmp_path):
    process = program(tmp_path, "steps=100000", "log_every=1", *TWO)
    while not (tmp_path / "metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 0
    step = checkpoint.read(tmp_path / "checkpoints/last.ckpt").step
    assert table.read(tmp_path / "metrics.csv")[-1]["step"] == str(step)


def test_the_target_is_no_part_of_what_a_strategy_sees():
    """It would be broadcast by DDP and DeepSpeed at every start, and cast."""
    module = TrainModule(toy.Toy(toy.Draft(), toy.Frozen()), PLAIN)
    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    assert names == {f"objective.module.{name}" for name, _ in toy.Draft().named_parameters()}
    assert isinstance(module.objective.target, toy.Frozen)


def test_fp32_products_are_as_exact_after_training_as_before(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    before = torch.get_float32_matmul_precision()
    toy.train(tmp_path, steps=1)
    assert seen[-1] == before


def test_seeds_make_runs_equal(tmp_path):
    toy.train(tmp_path / "a")
    toy.train(tmp_path / "b")
    assert (tmp_path / "a/metrics.csv").read_bytes() == (tmp_path / "b/metrics.csv").read_bytes()
    lightning.seed_everything(1, verbose=False)


def test_a_loss_by_document_is_divided_by_the_steps_documents(tmp_path, monkeypatch):
    """Rows of one, two and three documents in one step: as if the step were one row."""

    class ByDocument(toy.Toy):
        per_document = True

        def forward(self, batch):
            loss = super().forward(batch)
            documents = len(batch.bounds) - 1
            return Loss(loss.total / loss.tokens * documents, loss.tokens)

    def steps(self, item, get=toy.TokenBatch.__getitem__):
        batch = get(self, item)
        documents = 1 + batch.seed % 3
        bounds = (*range(documents), len(batch.ids_T))
        return replace(batch, bounds=bounds, documents_in_step=sum(1 + i % 3 for i in range(4)))

    monkeypatch.setattr(toy.TokenBatch, "__getitem__", steps)
    draft, total = toy.Draft(), 0.0
    for index in range(4):
        ids_T, mask_T = toy.row(index)
        loss = toy.Toy(draft)(toy.Batch(ids_T, (0, len(ids_T)), mask_T, seed=index, tokens_in_step=1))
        total = total + loss.total / loss.tokens * (1 + index % 3)
    (total / 7).backward()
    norm = nn.utils.clip_grad_norm_(draft.parameters(), float("inf"))
    settings = {"gradient_clip_val": None, "optim": PLAIN, "val_every": 0}
    toy.train(tmp_path, steps=1, objective=ByDocument(toy.Draft()), **settings)
    row = table.read(tmp_path / "metrics.csv")[0]
    assert float(row["train/grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"step 1 has no document with a supervised token.*doc0"):
        toy.train(tmp_path / "b", steps=1, objective=ByDocument(toy.Draft()), **settings)


def test_an_objectives_learning_rates_count_where_the_settings_say_nothing(tmp_path):
    class Faster(toy.Toy):
        lr_multipliers = {"embed*": 3.0, "out*": 5.0}

    optim = replace(PLAIN, lr_multipliers={"out*": 0.5})
    module = TrainModule(Faster(toy.Draft()), optim)
    module.trainer = Mock(precision="32-true", max_steps=10, strategy=Mock(root_device=torch.device("cpu")))
    optimizer = module.configure_optimizers()["optimizer"]
    rates = {id(p): group["initial_lr"] for group in optimizer.param_groups for p in group["params"]}
    draft = module.objective.module
    assert [rates[id(p)] / PLAIN.lr for p in (draft.embed.weight, draft.out.weight, draft.norm.weight)] == (
        pytest.approx([3.0, 0.5, 1.0])
    )
