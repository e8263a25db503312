"""A run that was killed, stopped or cut short goes on exactly where it was."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch

from longtrain.errors import ArtifactError, ConfigError, TrainingError
from longtrain.training import checkpoint, table
from longtrain.training.callbacks import Stopped
from longtrain.training.loop import build_trainer
from longtrain.training.settings import LoopConfig
from tests.helpers import PROCESSES

from . import toy


def start(folder, *settings):
    """The toy in a process of its own."""
    process = PROCESSES.Process(target=toy.main, args=([str(folder), *settings],))
    process.start()
    return process


def wait_for_step(folder, step, process):
    """Until the run has written a step, or its process has ended."""
    while process.is_alive():
        rows = table.read(folder / "metrics.csv")
        if rows and int(rows[-1]["step"]) >= step:
            return
        time.sleep(0.002)


def newest(folder):
    return checkpoint.read(folder / "checkpoints" / "last.ckpt")


def same_state(left, right):
    """Weights, optimizer and schedule of two checkpoints, bit for bit."""
    for file in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        a, b = left.tensors(file), right.tensors(file)
        assert set(a) == set(b) and len(a) >= 5
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert left.about["state"]["schedule"] == right.about["state"]["schedule"]


def stop_after(monkeypatch, step, name="SIGTERM"):
    """Have the run receive a signal while it takes a step."""
    original = toy.Toy.forward

    def forward(self, batch):
        if self.training and batch.seed == 4 * (step - 1) + 1:
            os.kill(os.getpid(), getattr(signal, name))
        return original(self, batch)

    monkeypatch.setattr(toy.Toy, "forward", forward)


@pytest.mark.parametrize("step", [1, 3, 4, 7, 11])  # 4: a validation and no other checkpoint falls on it
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch, step):
    toy.train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(Stopped, match=f"SIGTERM after step {step}; saved .*last.ckpt; run the same"):
            toy.train(tmp_path / "cut")
    assert table.read(tmp_path / "cut/metrics.csv")[-1]["step"] == str(step)
    summary, _ = toy.train(tmp_path / "cut")
    assert summary["steps_this_session"] == 12 - step and summary["documents"] == 48
    assert (tmp_path / "whole/metrics.csv").read_bytes() == (tmp_path / "cut/metrics.csv").read_bytes()
    same_state(newest(tmp_path / "whole"), newest(tmp_path / "cut"))


def test_handlers_are_given_back(tmp_path, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    toy.train(tmp_path / "a", steps=2)
    stop_after(monkeypatch, 1, "SIGUSR1")
    with pytest.raises(Stopped, match="SIGUSR1"):
        toy.train(tmp_path / "b", steps=2)
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]


def test_lightning_neither_catches_signals_nor_hides_that_a_rank_is_gone(tmp_path, monkeypatch):
    """Its broadcast before each micro-batch ignores errors; the other ranks would wait for each other."""
    handler, asked = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **kwargs: asked.append(args))
    trainer = build_trainer(LoopConfig(accelerator="cpu", devices=1, precision="32-true"), tmp_path)
    replaced = {
        trainer.fit_loop.epoch_loop: "_broadcast_sigterm_tensor",
        trainer._signal_connector: "register_signal_handlers",
    }
    for owner, name in replaced.items():
        assert hasattr(type(owner), name), f"Lightning has no {name} any more: what replaces it?"
        getattr(owner, name)()
    assert asked == [] and signal.getsignal(signal.SIGTERM) == handler


def test_kill_at_random_moments_and_resume_gives_the_same_file(tmp_path):
    """A real process, killed again and again: `metrics.csv` and the weights equal an unbroken run's."""
    settings = ["steps=40", "checkpoint_every_steps=5", "val_every=7", "sleep=0.004"]
    whole = start(tmp_path / "whole", *settings)
    whole.join()
    cut = tmp_path / "cut"
    chance = random.Random(0)
    kills = saved = 0
    for _ in range(20):
        process = start(cut, *settings)
        wait_for_step(cut, saved + chance.randint(3, 14), process)
        time.sleep(chance.uniform(0, 0.06))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        found = checkpoint.find(cut / "checkpoints", "auto")
        saved = checkpoint.read(found).step if found else 0
        assert saved % 5 == 0
    assert process.exitcode == 0 and kills >= 3
    assert (tmp_path / "whole/metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
    same_state(newest(tmp_path / "whole"), newest(tmp_path / "cut"))


def test_sigterm_to_a_process_saves_and_leaves_with_zero(tmp_path):
    process = start(tmp_path, "steps=10000", "log_every=1", "sleep=0.01")
    wait_for_step(tmp_path, 1, process)
    process.terminate()
    process.join(60)
    assert process.exitcode == 0
    step = checkpoint.read(tmp_path / "checkpoints" / "last.ckpt").step
    assert 0 < step < 10000 and table.read(tmp_path / "metrics.csv")[-1]["step"] == str(step)


def test_resume_refuses_settings_that_changed(tmp_path):
    toy.train(tmp_path, steps=4, facts={"optim.lr": 0.01, "method.window": 512, "seed": 0})
    with pytest.raises(ConfigError) as error:
        toy.train(tmp_path, steps=6, facts={"optim.lr": 0.02, "method.window": 512, "data.sha256": "ab"})
    text = str(error.value)
    for part in (
        "optim.lr: 0.01 -> 0.02",
        "trainer.max_steps: 4 -> 6",
        "data.sha256: None -> ab",
        "seed: 0 -> None",
    ):
        assert part in text
    assert "method.window" not in text and "resume=never" in text


def test_never_starts_anew_and_keeps_the_old_run_aside(tmp_path):
    toy.train(tmp_path, steps=4)
    old = (tmp_path / "metrics.csv").read_bytes()
    summary, _ = toy.train(tmp_path, steps=2, resume="never")
    assert summary["steps"] == 2 and len(table.read(tmp_path / "metrics.csv")) == 3
    assert (tmp_path / "before_1" / "metrics.csv").read_bytes() == old
    assert (tmp_path / "before_1" / "checkpoints" / "last.ckpt").exists()


def test_a_finished_run_is_not_trained_again(tmp_path):
    first, _ = toy.train(tmp_path, steps=4)
    stamp = (tmp_path / "metrics.csv").stat().st_mtime_ns
    again, _ = toy.train(tmp_path, steps=4)
    assert again == first and (tmp_path / "metrics.csv").stat().st_mtime_ns == stamp


def test_rows_of_a_run_killed_before_its_first_checkpoint_are_forgotten(tmp_path):
    toy.train(tmp_path / "whole", steps=5)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/metrics.csv").write_text("step,train/loss\n1,9.0\n2,8.")
    toy.train(tmp_path / "cut", steps=5)
    assert (tmp_path / "whole/metrics.csv").read_bytes() == (tmp_path / "cut/metrics.csv").read_bytes()


def damage(path, how):
    raw = path.read_bytes()
    if how == "absent":
        path.unlink()
    elif how == "flipped":
        path.write_bytes(raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 4]) + raw[len(raw) // 2 + 1 :])
    else:
        path.write_bytes(raw[: len(raw) // 2])


@pytest.mark.parametrize(
    ("file", "how", "reason"),
    [
        ("weights.safetensors", "flipped", "weights.safetensors does not match its checksum"),
        ("weights.safetensors", "truncated", r"weights.safetensors has \d+ bytes of \d+"),
        ("optimizer.safetensors", "absent", "optimizer.safetensors: No such file"),
        ("longtrain.json", "absent", "longtrain.json: No such file"),
        ("longtrain.json", "truncated", "is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_last_good_one(tmp_path, file, how, reason):
    toy.train(tmp_path, steps=6, checkpoint_every_steps=3, val_every=0)
    last = tmp_path / "checkpoints" / "last.ckpt"
    damage(last / file, how)
    with pytest.raises(ArtifactError, match=reason) as error:
        checkpoint.find(last.parent, "auto")
    with pytest.raises(ConfigError, match=r"is a folder of checkpoints; pass resume=.*last\.ckpt"):
        checkpoint.find(last.parent, str(last.parent))
    assert f"checkpoint {last} is damaged" in str(error.value)
    assert f"resume={last.with_name('previous.ckpt')}" in str(error.value)
    if file == checkpoint.WEIGHTS:
        previous = last.with_name("previous.ckpt")
        toy.train(tmp_path, steps=6, resume=str(previous))
        assert checkpoint.read(last).step == 6
        assert checkpoint.read(checkpoint.find(last.parent, str(previous))).step == 3  # the damaged one went
        damage(last / file, how)
    shutil.rmtree(last.with_name("previous.ckpt"))
    with pytest.raises(ArtifactError, match="no good one beside it; pass resume=never"):
        checkpoint.verify(last)


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Whatever bit of whatever file of a checkpoint is flipped, the check refuses it."""
    toy.train(tmp_path, steps=1, val_every=0)
    last = tmp_path / "checkpoints" / "last.ckpt"
    chance = random.Random(0)
    for path in sorted(last.iterdir()):
        raw = path.read_bytes()
        spaces = 0
        for _ in range(60):
            at = chance.randrange(len(raw))
            wrong = bytearray(raw)
            wrong[at] ^= 1 << chance.randrange(8)
            path.write_bytes(wrong)
            if path.suffix == ".json" and raw[at : at + 1].isspace() and wrong[at : at + 1].isspace():
                spaces += 1  # between two values of JSON, where nothing is said
                continue
            with pytest.raises(ArtifactError):
                checkpoint.verify(last)
                pytest.fail(f"byte {at} of {path.name}")
        path.write_bytes(raw)
        assert spaces < 30
    checkpoint.verify(last)


def test_a_checkpoint_that_is_none_of_ours_is_refused(tmp_path):
    path = tmp_path / "weights.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ArtifactError, match=r"not a training checkpoint.*earlier longtrain.*init=ARTIFACT"):
        toy.train(tmp_path / "run", steps=2, resume=str(path))
    with pytest.raises(ConfigError, match="no checkpoint at resume="):
        toy.train(tmp_path / "run", steps=2, resume=str(tmp_path / "absent.ckpt"))


def test_the_state_of_callbacks_is_kept_and_what_cannot_be_is_refused(tmp_path):
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import EarlyStopping

    def watching():
        return EarlyStopping("val/loss", patience=50, min_delta=100.0)

    toy.train(tmp_path / "a", steps=8, callbacks=[watching()])
    (tmp_path / "a/summary.json").unlink()
    again = watching()
    toy.train(tmp_path / "a", steps=8, callbacks=[again])
    assert again.wait_count == 1 and torch.isfinite(again.best_score)

    class Odd(Callback):
        def state_dict(self):
            return {"what": {"it is": object()}}

    with pytest.raises(ConfigError, match=r"callbacks.*what.it is holds a object, which a checkpoint cannot"):
        toy.train(tmp_path / "b", steps=2, callbacks=[Odd()])
    assert not list((tmp_path / "b/checkpoints").iterdir())


def test_killed_between_the_two_renames_the_run_before_is_found(tmp_path):
    toy.train(tmp_path / "whole", steps=6, checkpoint_every_steps=3)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/checkpoints/last.ckpt").rename(tmp_path / "cut/checkpoints/incoming.ckpt")
    toy.train(tmp_path / "cut", steps=6, checkpoint_every_steps=3)
    assert (tmp_path / "whole/metrics.csv").read_bytes() == (tmp_path / "cut/metrics.csv").read_bytes()
    same_state(newest(tmp_path / "whole"), newest(tmp_path / "cut"))


def test_a_disk_that_fills_up_while_saving_is_one_clear_error(tmp_path):
    """A limit on the size of files stands for the full disk: the write fails half-way."""
    toy.train(tmp_path, steps=8, facts={"x": 1}, checkpoint_every_steps=4)
    shutil.rmtree(tmp_path / "checkpoints/last.ckpt")  # as if killed at step 4
    kept = tmp_path / "checkpoints/previous.ckpt"
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[checkpoint.STATE]) // 2, limits[1]))
        with pytest.raises(TrainingError) as error:
            toy.train(tmp_path, steps=8, facts={"x": 1}, checkpoint_every_steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert "cannot save a checkpoint at step 8" in str(error.value) and "MiB are free" in str(error.value)
    assert "previous.ckpt (step 4)" in str(error.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["previous.ckpt"]
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    summary, _ = toy.train(tmp_path, steps=8, facts={"x": 1}, checkpoint_every_steps=4)
    assert summary["steps_this_session"] == 4


def test_a_really_full_disk(tmp_path):
    """A file system of 84 KiB, which holds two checkpoints and not three, where this may be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=84k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root; the size-limit test above covers the same path")
    try:
        with pytest.raises(TrainingError, match="No space left on device"):
            toy.train(small, steps=8, checkpoint_every_steps=2)
        left = sorted(path.name for path in (small / "checkpoints").iterdir())
        assert "incoming.ckpt" not in left and not [name for name in left if name.endswith(".tmp")]
        assert left and checkpoint.read(small / "checkpoints" / "last.ckpt").step >= 2
    finally:
        subprocess.run(["umount", str(small)], check=True)
