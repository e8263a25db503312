"""A dry run of `train` under torchrun: what it prints when all is well, and the first thing that is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longtrain.config import RunConfig
from longtrain.errors import LongtrainError
from longtrain.files import free_bytes
from longtrain.jobs import ranks_check
from longtrain.jobs.planning.run_plan import RunPlan
from longtrain.jobs.ranks_check import GIB, Rank, check_alike, check_room, room_here

ROOT = Path(__file__).parent.parent.parent


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


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


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A dry run of the quickstart's training on so many ranks of this machine."""
    started = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    started += [f"--master-port={free_port()}", "-m", "longtrain", "train", "+recipe=quickstart"]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
    return subprocess.run(
        [*started, "dry_run=true", *words],
        env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, run: Any) -> Any:
    """`dry_run(*words)`: exit code, stdout and stderr of a single rank that torchrun started."""

    def call(*words: str, recipe: str = "quickstart") -> tuple[int, str, str]:
        for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": free_port()}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        done = run("train", f"+recipe={recipe}", "dry_run=true", *words)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.slow
def test_two_ranks_meet_and_end_with_one_line(home: Path) -> None:
    done = torchrun(2, f"home={home}", "trainer=cpu", "trainer.strategy=ddp", "trainer.devices=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ranks=2 nodes=1 all_reduce=gloo 16 MiB in ")
    assert done.stdout.count("\n") == 1 and done.stderr.count("dry run of train: no error") == 1


@pytest.mark.slow
def test_what_one_of_two_ranks_lacks_is_told_once(tmp_path: Path) -> None:
    words = [f"home={tmp_path}", "trainer=cpu", "trainer.strategy=ddp", "trainer.devices=2"]
    done = torchrun(2, *words)
    assert done.returncode != 0 and done.stderr.count("longtrain: error: ") == 1
    assert "no prepared data at" in done.stderr and not list(tmp_path.rglob(".dry_run"))


def test_one_rank_ends_with_one_line(dry_run: Any, home: Path) -> None:
    code, out, error = dry_run(f"home={home}")
    assert code == 0 and out.startswith("ranks=1 nodes=1 all_reduce=gloo"), error
    assert "data=excerpt-" in out and "disk=" in out and out.count("\n") == 1
    assert not list(home.rglob(".dry_run"))


@pytest.mark.gpu
def test_every_gpu_of_the_machine_adds_up_over_nccl(home: Path) -> None:
    import torch

    done = torchrun(torch.cuda.device_count(), "trainer=ddp", f"home={home}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"ranks={torch.cuda.device_count()} nodes=1 all_reduce=nccl 256 MiB in ")
    assert "gpu=" in done.stdout and done.stdout.count("\n") == 1


def test_a_method_without_a_target_needs_none(dry_run: Any, tmp_path: Path) -> None:
    code, out, error = dry_run("trainer=cpu", f"home={tmp_path}", recipe="target_tiny")
    assert code == 0 and "data=its own" in out, error


def test_data_that_are_not_prepared_are_named(dry_run: Any, tmp_path: Path) -> None:
    code, out, error = dry_run(f"home={tmp_path}")
    assert code == 1 and not out
    assert "no prepared data at" in error and "longtrain prepare" in error


def test_without_a_launcher_no_ranks_are_tried(run: Any, tmp_path: Path) -> None:
    done = run("train", "+recipe=quickstart", "dry_run=true", f"home={tmp_path}")
    assert done.returncode == 0 and not done.stdout and "no error" in done.stderr


def test_a_rank_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch, composed: Any) -> None:
    monkeypatch.setenv("MASTER_PORT", free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(ranks_check, "SECONDS", 1.0)
    cfg = composed("train", "+recipe=quickstart", "trainer.num_nodes=2", "trainer.strategy=ddp")
    with pytest.raises(
        LongtrainError, match=r"the 2 ranks did not meet at 127\.0\.0\.1:\d+ within 1 s"
    ) as told:
        ranks_check.check(cfg, Rank(world=2))
    assert "\n" not in str(told.value)


def test_an_all_reduce_that_hangs_or_fails_names_who(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {"node": "a", "seconds": 0.5, "error": ""}
    ranks_check._refuse_reduced("nccl", [fine, fine])
    with pytest.raises(LongtrainError, match=r"nccl on rank 1 \(node b\) failed: no route; set NCCL_SOCKET"):
        ranks_check._refuse_reduced("nccl", [fine, {"node": "b", "seconds": None, "error": "no route"}])
    with pytest.raises(LongtrainError, match=r"gloo on rank 0 \(node b\) did not end within 120 s; set GLOO"):
        ranks_check._refuse_reduced("gloo", [{"node": "b", "seconds": None, "error": ""}, fine])
    said: list[int] = []
    forever = threading.Event()
    monkeypatch.setattr(ranks_check, "SECONDS", 0.1)
    monkeypatch.setattr(ranks_check, "_reduced", lambda *rest: forever.wait())
    monkeypatch.setattr(ranks_check, "_gathered", lambda value, rank: [value])
    monkeypatch.setattr(ranks_check.os, "_exit", said.append)
    with pytest.raises(TypeError):  # where a process would have ended
        ranks_check._all_reduce("gloo", None, Rank())  # type: ignore[arg-type]
    assert said == [1]
    forever.set()


def test_what_is_too_small_is_told_with_bytes_and_advice(
    composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longtrain.costs.footprint import Footprint, Spread

    plan: Any = SimpleNamespace(held=Footprint(target=17 * GIB), trained=0, moments=0, layout=Spread())
    monkeypatch.setattr(ranks_check, "checkpoint_bytes", lambda trained, moments: GIB)
    rich = {"node": "a", "room": {"gpu": 80 * GIB, "host": 9 * GIB, "disk": 9 * GIB}}
    words = check_room(plan, [rich, {"node": "b", "room": {"gpu": 20 * GIB}}])
    assert words[0] == "gpu=20 GiB free (19.9 needed)" and len(words) == 3
    for room, says in (
        ({"gpu": 10 * GIB}, r"GPU on node b .* has 10 GiB, and 19\.85 GiB .*shard=fsdp2"),
        ({"host": 9 * GIB, "disk": 1}, r"disk below run_dir on node b: .* are free, the run needs"),
    ):
        with pytest.raises(LongtrainError, match=says):
            check_room(plan, [rich, {"node": "b", "room": room}])
    with pytest.raises(LongtrainError, match=r"host memory on node c: 1 GiB .* needs 17 GiB .*sbatch --mem"):
        check_room(plan, [{"node": "c", "room": {"host": GIB, "disk": 99 * GIB}}])


def test_the_need_is_that_of_the_strategy_and_of_stored_features(composed: Any) -> None:
    def host(*words: str) -> float:
        cfg = composed("train", "+recipe=longspec_llama8b_long", "target.path=null", *words)
        room = {"node": "a", "room": {"host": 2**50}}
        (said,) = check_room(RunPlan(cfg, devices=2, nodes=1), [room, {"node": "a", "room": {}}])
        return float(said.partition("(")[2].split()[0])

    cpu = "trainer.accelerator=cpu"
    whole = host(cpu)
    assert host(cpu, "features=offline") < host(cpu, "target.shard=fsdp2") < whole
    assert host("trainer=deepspeed_zero2", cpu) < whole


def test_plan_dry_run_and_train_say_one_sentence(
    composed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A pretended device of 16 GB, and a target of 8B shape with LongSpec's draft."""
    import torch

    from longtrain.costs import hardware
    from longtrain.jobs import plan, train
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
    with pytest.raises(LongtrainError) as again:
        check_room(
            RunPlan(composed("train", *words), devices=1, nodes=1), [{"node": "a", "room": {"gpu": has}}]
        )
    assert str(again.value).endswith(sentence)
    split = composed("train", *words, "target.shard=fsdp2")
    RunPlan(split, devices=4, nodes=1).refuse_lack(torch.device("cpu"))


def test_checkpoints_that_new_ones_replace_count_as_room(tmp_path: Path) -> None:
    import torch

    cfg = RunConfig({"run_dir": str(tmp_path), "home": str(tmp_path)})
    last = tmp_path / "train" / "checkpoints" / "last.ckpt"
    last.mkdir(parents=True)
    (last / "weights.safetensors").write_bytes(bytes(2**22))
    disk = room_here(cfg, torch.device("cpu"), first=True)["disk"]
    assert disk is not None and disk > free_bytes(tmp_path) + 2**21


def test_other_versions_are_told_with_their_node() -> None:
    reports: list[dict[str, Any]] = [
        {"node": name, "versions": {"torch": version}} for name, version in (("a", "2.11"), ("b", "2.10"))
    ]
    check_alike([reports[0], reports[0]])
    with pytest.raises(LongtrainError, match=r"node b has torch 2\.10, node a has 2\.11"):
        check_alike(reports)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.num_nodes=2"], "make 2 ranks, and 1 were started"),
        (["trainer.sequences_per_step=3", "trainer.num_nodes=2"], "make 2 ranks"),
        (["trainer=deepspeed_zero3", "trainer.devices=1"], "stage 3 cannot train here; allowed"),
        (["trainer.num_nodes=two"], "trainer.num_nodes=two; allowed: a whole number"),
        (["features=offline"], "holds none; fill it first: features=fill"),
        (["target.shard=fsdp2"], "trainer.devices is 1; pass trainer=ddp trainer.devices=2"),
        (["trainer.strategy=fsdp"], "would split the trained module"),
    ],
)
def test_wrong_settings_are_one_line(dry_run: Any, words: list[str], message: str, tmp_path: Path) -> None:
    code, _, error = dry_run(f"home={tmp_path}", *words)
    assert code == 1 and message in error and error.count("longtrain: error: ") == 1
