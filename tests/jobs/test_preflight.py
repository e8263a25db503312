"""What a preflight says when all is well, and the first thing that is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longtrain.costs.held import Held
from longtrain.errors import LongtrainError
from longtrain.files import free_bytes
from longtrain.jobs.preflight import _check_alike
from longtrain.jobs.preflight_needs import Needs, Room, needs_of, room_here
from longtrain.jobs.preflight_ranks import Meeting, Rank

ROOT = Path(__file__).parent.parent.parent
GIB = 2**30


def start(*words: str, **env: str) -> subprocess.Popen[str]:
    """One rank of `longtrain preflight` for the quickstart recipe."""
    command = [sys.executable, "-m", "longtrain", "preflight", "+recipe=quickstart", "quiet=true", *words]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
    return subprocess.Popen(
        command,
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe's data."""
    from longtrain.cli import main

    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["longtrain", "prepare", "+recipe=quickstart", f"home={folder}", "quiet=true"]
        )
        main()
    return folder


@pytest.fixture
def preflight(monkeypatch: pytest.MonkeyPatch, run: Any) -> Any:
    """`preflight(*words)`: exit code, stdout and stderr of one rank in this process."""

    def call(*words: str, recipe: str = "quickstart") -> tuple[int, str, str]:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        done = run("preflight", f"+recipe={recipe}", "quiet=true", *words)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.slow
def test_two_ranks_meet_and_end_with_one_line(home: Path) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    shared |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS_PER_NODE": "1"}
    words = [f"home={home}", "trainer.num_nodes=2", "timeout_s=200"]
    ranks = [start(*words, SLURM_PROCID=str(n), SLURMD_NODENAME="ab"[n], **shared) for n in (0, 1)]
    (out, error), (other, _) = (rank.communicate(timeout=280) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], error
    assert out.startswith("preflight ok: ranks=2 nodes=2 all_reduce=gloo 16 MiB in ")
    assert out.count("\n") == 1 and not other


def test_one_rank_ends_with_one_line(preflight: Any, home: Path) -> None:
    code, out, error = preflight(f"home={home}", "timeout_s=200")
    assert code == 0 and out.startswith("preflight ok: ranks=1 nodes=1 all_reduce=gloo"), error
    assert "data=excerpt-" in out and "disk=" in out and out.count("\n") == 1
    assert not list(home.rglob(".preflight"))


@pytest.mark.gpu
def test_every_gpu_of_the_machine_adds_up_over_nccl(home: Path) -> None:
    import torch

    rank = start("trainer=ddp", f"home={home}", "timeout_s=100")
    out, error = rank.communicate(timeout=200)
    assert rank.returncode == 0, error
    assert out.startswith(
        f"preflight ok: ranks={torch.cuda.device_count()} nodes=1 all_reduce=nccl 256 MiB in "
    )
    assert "gpu=" in out and out.count("\n") == 1


def test_a_method_without_a_target_needs_none(preflight: Any, tmp_path: Path) -> None:
    code, _, error = preflight("trainer=cpu", f"home={tmp_path}", recipe="target_tiny")
    assert code == 0, error


def test_data_that_are_not_prepared_are_named(preflight: Any, tmp_path: Path) -> None:
    code, out, error = preflight(f"home={tmp_path}")
    assert code == 1 and not out
    assert "no prepared data at" in error and "longtrain prepare" in error and error.count("\n") == 1


def test_a_rank_that_never_comes_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    began = time.monotonic()
    meeting = Meeting(Rank(0, 4, per_node=2, node="a", nodes=("a", "b")), 1.0)
    meeting.tell("report", {})
    meeting.store.set("report/2", "{}")
    expected = r"2 of 4 ranks did not come within 1 s: rank 1 \(node a\), rank 3 \(node b\)"
    with pytest.raises(LongtrainError, match=expected):
        meeting.collect("report")
    assert time.monotonic() - began < 30


def test_an_all_reduce_that_hangs_or_fails_names_who(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    meeting = Meeting(Rank(0, 2, node="a", nodes=("a", "b")), 2.0)
    monkeypatch.setattr(meeting, "_reduced", lambda *rest: 0.5)
    with pytest.raises(
        LongtrainError, match=r"gloo did not end within 2 s; still in it: rank 1 \(node b\); set GLOO"
    ):
        meeting.all_reduce("gloo", None, mebibytes=1)
    meeting.store.set("reduced/1", '{"error": "no route"}')
    with pytest.raises(
        LongtrainError, match=r"nccl failed on rank 1 \(node b\): no route; set NCCL_SOCKET_IFNAME"
    ):
        meeting.all_reduce("nccl", None, mebibytes=1)


def test_what_is_too_small_is_told_with_bytes_and_advice() -> None:
    needs = Needs(gpu=Held(target=17 * GIB), host=2 * GIB, disk=3 * GIB)
    rich = Room(gpu=80 * GIB, host=9 * GIB, disk=9 * GIB)
    needs.check([("a", rich), ("b", Room(gpu=20 * GIB))])
    with pytest.raises(LongtrainError, match=r"GPU on node b .* has 10 GiB, and 19\.85 GiB .*shard=fsdp2"):
        needs.check([("a", rich), ("b", Room(gpu=10 * GIB))])
    with pytest.raises(
        LongtrainError, match=r"disk below run_dir on node a: 1 GiB are free, the run needs 3 GiB"
    ):
        needs.check([("a", Room(host=9 * GIB, disk=GIB))])
    with pytest.raises(LongtrainError, match=r"host memory on node a: 1 GiB .*sbatch --mem"):
        needs.check([("a", Room(host=GIB, disk=9 * GIB))])


def test_the_need_is_that_of_the_strategy_and_of_stored_features(composed: Any) -> None:
    def host(*words: str) -> int:
        command = ["+recipe=longspec_llama8b_long", "target.path=null", "trainer.accelerator=cpu", *words]
        return needs_of(composed("preflight", *command), Rank(world=2, per_node=2)).host

    whole = host()
    assert host("features=offline") < host("target.shard=fsdp2") < whole
    assert host("trainer=deepspeed_zero2", "trainer.accelerator=cpu") < whole


def test_plan_preflight_and_train_say_one_sentence(
    composed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A pretended device of 16 GB, and a target of 8B shape with LongSpec's draft."""
    import torch

    from longtrain.costs import hardware
    from longtrain.jobs import outline, plan, train
    from longtrain.targets import loading
    from longtrain.targets.shapes import shape_config

    has = 16_000_000_000
    shape_config("llama31_8b").save_pretrained(tmp_path)  # no weights and no tokenizer: they would be told
    words = ["+recipe=longspec_llama8b_long", f"target.path={tmp_path}", "target.dtype=bfloat16"]
    words += ["trainer=cpu", f"home={tmp_path}"]
    monkeypatch.setattr(loading, "device_bytes", lambda device: has)
    with pytest.raises(LongtrainError, match=r"cpu has 14\.9 GiB") as told:
        train.run(composed("train", *words))
    _, _, sentence = str(told.value).partition(" has ")
    small = hardware.Gpu("H200", 1e15, 1e12, has, 1e11, 6e10)
    monkeypatch.setitem(hardware.GPUS, "H200", small)
    plan.run(composed("plan", *words, "trainer.accelerator=cuda"))
    assert sentence in capsys.readouterr().out
    held, _ = outline.held_of(composed("preflight", *words), devices=1, nodes=1)
    with pytest.raises(LongtrainError) as again:
        Needs(held, 0, 0).check([("a", Room(gpu=has))])
    assert str(again.value).endswith(sentence)
    outline.check_room(
        composed("train", *words, "target.shard=fsdp2"), device=torch.device("cpu"), devices=4, nodes=1
    )


def test_checkpoints_that_new_ones_replace_count_as_room(tmp_path: Path) -> None:
    import torch
    from omegaconf import OmegaConf

    cfg = OmegaConf.create({"run_dir": str(tmp_path), "home": str(tmp_path)})
    last = tmp_path / "train" / "checkpoints" / "last.ckpt"
    last.mkdir(parents=True)
    (last / "weights.safetensors").write_bytes(bytes(2**22))
    room = room_here(cfg, torch.device("cpu"), first=True)
    assert room.disk is not None and room.disk > free_bytes(tmp_path) + 2**21


def test_other_versions_are_told_with_their_node() -> None:
    reports: list[dict[str, Any]] = [
        {"node": name, "versions": {"torch": version}} for name, version in (("a", "2.11"), ("b", "2.10"))
    ]
    _check_alike([reports[0], reports[0]])
    with pytest.raises(LongtrainError, match=r"node b has torch 2\.10, node a has 2\.11"):
        _check_alike(reports)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.num_nodes=2"], "make 2 ranks, and 1 were started"),
        (["trainer.rows_per_step=3", "trainer.num_nodes=2"], "make 2 ranks"),
        (["timeout_s=0"], "timeout_s=0; allowed"),
        (["trainer=deepspeed_zero3", "trainer.devices=1"], "stage 3 cannot train here; allowed"),
        (["trainer.num_nodes=two"], "trainer.num_nodes=two; allowed: a whole number"),
        (["features=offline"], "holds none; fill it first: features=fill"),
        (["target.shard=fsdp2"], "trainer.devices is 1; pass trainer=ddp trainer.devices=2"),
        (["trainer.strategy=fsdp"], "would split the trained module"),
    ],
)
def test_wrong_settings_are_one_line(preflight: Any, words: list[str], message: str, tmp_path: Path) -> None:
    code, _, error = preflight(f"home={tmp_path}", *words)
    assert code == 1 and message in error and error.count("\n") == 1
