"""A run that was killed, stopped or cut short goes on exactly where it was."""

import multiprocessing
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

from . import toy

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "lightning.pytorch", "rich.progress"])


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


def weights(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def same_state(left, right):
    """Weights, optimizer and schedule of two checkpoints, bit for bit."""
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        a, b = (torch.utils._pytree.tree_flatten(state[key])[0] for state in (left, right))
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


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
    same_state(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_handlers_are_given_back(tmp_path, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    toy.train(tmp_path / "a", steps=2)
    stop_after(monkeypatch, 1, "SIGUSR1")
    with pytest.raises(Stopped, match="SIGUSR1"):
        toy.train(tmp_path / "b", steps=2)
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]


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
    same_state(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


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


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not_zip"])
def test_a_damaged_checkpoint_is_named_with_the_last_good_one(tmp_path, damage):
    toy.train(tmp_path, steps=6, checkpoint_every_steps=3)
    last = tmp_path / "checkpoints" / "last.ckpt"
    raw = bytearray(last.read_bytes())
    if damage == "flipped":
        at = raw.index(
            torch.load(last, weights_only=True)["state_dict"]["objective.module.embed.weight"]
            .numpy()
            .tobytes()
        )
        raw[at + 5] ^= 4
    last.write_bytes(
        {"truncated": raw[: len(raw) // 2], "empty": b"", "not_zip": b"x" * 500}.get(damage, raw)
    )
    with pytest.raises(ArtifactError) as error:
        toy.train(tmp_path, steps=6)
    assert f"checkpoint {last} is damaged" in str(error.value)
    assert f"resume={last.with_name('previous.ckpt')}" in str(error.value)
    toy.train(tmp_path, steps=6, resume=str(last.with_name("previous.ckpt")), checkpoint_every_steps=3)
    assert checkpoint.read(last).step == 6
    last.write_bytes(b"")
    last.with_name("previous.ckpt").unlink()
    with pytest.raises(ArtifactError, match="no other one beside it; pass resume=never"):
        toy.train(tmp_path, steps=6)


def test_no_flipped_byte_goes_unnoticed(tmp_path):
    """Either the check refuses the file, or every tensor in it is still what it was."""
    tensors = {"a": torch.randn(50, 20), "step": 3}
    path = tmp_path / "x.ckpt"
    checkpoint.AtomicIO().save_checkpoint(tensors, path)
    raw = path.read_bytes()
    chance = random.Random(0)
    caught = 0
    for _ in range(150):
        wrong = bytearray(raw)
        wrong[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(wrong)
        try:
            checkpoint.verify(path)
        except ArtifactError:
            caught += 1
            continue
        loaded = torch.load(path, weights_only=True)
        assert torch.equal(loaded["a"], tensors["a"]) and loaded["step"] == 3
    assert caught > 100


def test_a_checkpoint_that_is_none_of_ours_is_refused(tmp_path):
    path = tmp_path / "weights.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ArtifactError, match=r"not a training checkpoint of longtrain.*init=ARTIFACT"):
        toy.train(tmp_path / "run", steps=2, resume=str(path))
    with pytest.raises(ConfigError, match="no checkpoint at resume="):
        toy.train(tmp_path / "run", steps=2, resume=str(tmp_path / "absent.ckpt"))


def test_killed_between_the_two_renames_the_run_before_is_found(tmp_path):
    toy.train(tmp_path / "whole", steps=6, checkpoint_every_steps=3)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/checkpoints/last.ckpt").rename(tmp_path / "cut/checkpoints/incoming.ckpt")
    toy.train(tmp_path / "cut", steps=6, checkpoint_every_steps=3)
    assert (tmp_path / "whole/metrics.csv").read_bytes() == (tmp_path / "cut/metrics.csv").read_bytes()
    same_state(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_a_disk_that_fills_up_while_saving_is_one_clear_error(tmp_path):
    """A limit on the size of files stands for the full disk: the write fails half-way."""
    toy.train(tmp_path, steps=8, facts={"x": 1}, checkpoint_every_steps=4)
    for name in ("last.ckpt",):  # as if killed at step 4
        (tmp_path / "checkpoints" / name).unlink()
    before = (tmp_path / "checkpoints/previous.ckpt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        with pytest.raises(TrainingError) as error:
            toy.train(tmp_path, steps=8, facts={"x": 1}, checkpoint_every_steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert "cannot save a checkpoint at step 8" in str(error.value) and "MiB are free" in str(error.value)
    assert "previous.ckpt (step 4)" in str(error.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["previous.ckpt"]
    assert (tmp_path / "checkpoints/previous.ckpt").read_bytes() == before
    summary, _ = toy.train(tmp_path, steps=8, facts={"x": 1}, checkpoint_every_steps=4)
    assert summary["steps_this_session"] == 4


def test_a_really_full_disk(tmp_path):
    """A file system of 64 KiB, where this may be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True, check=False
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
