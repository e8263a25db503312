"""The dry run of a training started by torchrun or srun: checks that its ranks connect, agree, and have
resources.

In this order: the ranks connect, their versions are equal, they see one folder, target and prepared data
exist, disk and memory suffice for the run's minimum, and all ranks perform an all-reduce over NCCL (gloo on
CPUs). The minimum counts only what is certain: the target's weights, the trained weights and optimizer state,
and checkpoints; `longtrain plan` also estimates activations.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from longtrain import files, provenance
from longtrain.cache.room import free_bytes
from longtrain.costs.disk import GENERATIONS, checkpoint_bytes
from longtrain.costs.footprint import needed, refuse_lack
from longtrain.costs.hardware import GIB
from longtrain.errors import ConfigError, LongtrainError
from longtrain.jobs.planning.run_plan import RunPlan, devices_of
from longtrain.tables import print_lines

if TYPE_CHECKING:
    import torch

    from longtrain.config import RunConfig

SECONDS = 120.0
"""Seconds that ranks wait for each other: one may import its packages from a slow disk."""
MEBIBYTES = {"nccl": 256, "gloo": 16}
"""Size of the all-reduced tensor for each backend."""
LOCAL, MARK = "127.0.0.1", ".dry_run"


@dataclass(frozen=True)
class Rank:
    """This process in a run: global rank, world size, local rank, and ranks per machine."""

    number: int = 0
    world: int = 1
    local: int = 0
    per_node: int = 1

    @classmethod
    def here(cls) -> Rank | None:
        """Read the rank from torchrun's or srun's environment; None if neither started this process."""
        env = os.environ
        if "RANK" in env and "WORLD_SIZE" in env:
            world, local = int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
            return cls(int(env["RANK"]), world, local, int(env.get("LOCAL_WORLD_SIZE", world)))
        if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # the batch script itself is not a step
            world, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", 1))
            return cls(int(env["SLURM_PROCID"]), world, int(env.get("SLURM_LOCALID", 0)), -(-world // nodes))
        return None


def check(cfg: RunConfig, rank: Rank) -> None:
    """Check the requirements of training on every rank; rank 0 prints one line with the result.

    Raises:
        LongtrainError: the first check that failed, on rank 0, with advice.
        SystemExit: with code 1 on the other ranks, while rank 0 reports the error.
    """
    from torch import distributed

    plan = _planned(cfg, rank)
    host, port = (os.environ.setdefault(*pair) for pair in (("MASTER_ADDR", LOCAL), ("MASTER_PORT", "29500")))
    limit = timedelta(seconds=SECONDS)
    try:
        distributed.init_process_group("gloo", rank=rank.number, world_size=rank.world, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LongtrainError(
            f"rank {rank.number} on node {provenance.machine_name()}: the {rank.world} ranks did not meet at "
            f"{host}:{port} within {SECONDS:g} s ({' '.join(str(error).split())[:160]}); see what the "
            "others wrote, leave out a node that does not answer (sbatch --exclude=NODE), or set MASTER_ADDR "
            "and GLOO_SOCKET_IFNAME to what all nodes reach"
        ) from None
    try:
        line = _line(plan, rank)
    except RuntimeError as error:  # gloo raises this if another rank is gone
        raise LongtrainError(
            f"a rank ended during the dry run ({' '.join(str(error).split())[:160]}); its own output "
            "has the reason"
        ) from None
    except LongtrainError:
        if rank.number:
            raise SystemExit(1) from None
        raise
    finally:
        distributed.destroy_process_group()
    if not rank.number:
        print_lines(line)


def _line(plan: RunPlan, rank: Rank) -> str:
    """Perform all checks in order; every rank gets the same result, and therefore the same error."""
    from torch import distributed

    cfg = plan.cfg
    mark, token = cfg.run_dir / MARK, [str(time.time_ns())]
    distributed.broadcast_object_list(token, src=0)
    if not rank.number:
        files.write_text(mark, token[0])
    distributed.barrier()
    try:
        reports = _gathered({**_report(cfg, rank), "seen": _sees(mark, token[0])}, rank)
    finally:
        if not rank.number:
            mark.unlink(missing_ok=True)
    check_alike(reports)
    for report in reports:
        if not report["seen"]:
            raise LongtrainError(
                f"node {report['node']} does not see what node {reports[0]['node']} writes in "
                f"run_dir={cfg.run_dir}; put it on a file system that all nodes share: home=FOLDER"
            )
        if report["problem"]:
            raise LongtrainError(f"node {report['node']}: {report['problem']}")
    room = check_room(plan, reports)
    reduced = _all_reduce(_backend(cfg), _device(cfg, rank), rank)
    nodes, versions = {report["node"] for report in reports}, reports[0]["versions"]
    words = [f"ranks={rank.world}", f"nodes={len(nodes)}", reduced, *room, f"data={reports[0]['data']}"]
    return " ".join([*words, f"torch={versions['torch']}", f"longtrain={versions['longtrain']}"])


def _planned(cfg: RunConfig, rank: Rank) -> RunPlan:
    """The plan of the run on the ranks that were started."""
    trainer = cfg.trainer
    per_node, nodes = devices_of(trainer), trainer.num_nodes
    if per_node * nodes != rank.world:
        raise ConfigError(
            f"trainer.devices={trainer.devices} and trainer.num_nodes={nodes} make {per_node * nodes} ranks, "
            f"and {rank.world} were started; pass trainer.devices=(those of a node) and "
            "trainer.num_nodes=(nodes), or start as many"
        )
    plan = RunPlan(cfg, devices=rank.per_node, nodes=rank.world // rank.per_node)
    _ = plan.sequences_per_step, plan.layout
    return plan


def _backend(cfg: RunConfig) -> str:
    import torch

    accelerator = cfg.trainer.accelerator
    cuda = accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())
    return "nccl" if cuda else "gloo"


def _device(cfg: RunConfig, rank: Rank) -> torch.device:
    import torch

    devices = cfg.trainer.devices
    number = devices[rank.local] if isinstance(devices, list) else rank.local
    return torch.device("cuda", int(number)) if _backend(cfg) == "nccl" else torch.device("cpu")


def _gathered(value: dict[str, Any], rank: Rank) -> list[dict[str, Any]]:
    """Gather a value from every rank, in rank order."""
    from torch import distributed

    found: list[Any] = [None] * rank.world
    distributed.all_gather_object(found, value)
    return found


def _sees(mark: Path, token: str) -> bool:
    """True once rank 0's marker file is visible; shared file systems may show it seconds late."""
    for _ in range(25):
        if mark.exists() and mark.read_text() == token:
            return True
        time.sleep(0.2)
    return False


def _report(cfg: RunConfig, rank: Rank) -> dict[str, Any]:
    """The findings of one rank on its machine; `problem` is the first failed check."""
    facts = provenance.gather()
    versions = {**facts["versions"], "cuda": str(facts["machine"].get("cuda"))}
    versions["commit"] = (facts["git"] or {}).get("commit", "")
    report = {"node": provenance.machine_name(), "versions": versions, "problem": "", "room": {}, "data": ""}
    try:
        report["room"] = room_here(cfg, _device(cfg, rank), first=rank.local == 0)
        if rank.local == 0:  # other ranks of a machine see the same files
            report["data"] = _files_here(cfg)
    except (LongtrainError, OSError, RuntimeError) as error:
        report["problem"] = " ".join(str(error).split())
    return report


def _files_here(cfg: RunConfig) -> str:
    """Check that target and prepared data are on this machine; returns a short description of the data."""
    from longtrain.data.packing.prepare import tokenizer_hash
    from longtrain.data.packing.prepared import Prepared
    from longtrain.jobs.features import check_filled
    from longtrain.targets.at_hand import folder_at_hand
    from longtrain.targets.tokenizer import read_tokenizer

    spec, target = cfg.trained_method.spec, cfg.target
    if spec.export is None:
        whole = target.weights == "stored" and cfg.features.mode != "engine"
        folder_at_hand(target.required_path(), weights=whole)
        check_filled(cfg.features)
    if spec.data is not None:
        return "its own"
    tokenizer, _ = read_tokenizer(target.required_path(), **target.overrides)
    folder = cfg.home / "data" / f"{cfg.data.name}-{tokenizer_hash(tokenizer)[:8]}"
    return f"{folder.name} ({Prepared.open(folder).manifest['counts']['tokens']} tokens)"


def check_alike(reports: Sequence[dict[str, Any]]) -> None:
    """Refuse ranks that run other versions than rank 0.

    Raises:
        LongtrainError: the first package that differs.
    """
    first = reports[0]
    for report in reports[1:]:
        for name in sorted({*first["versions"], *report["versions"]}):
            mine, theirs = first["versions"].get(name), report["versions"].get(name)
            if mine != theirs:
                raise LongtrainError(
                    f"node {report['node']} has {name} {theirs}, node {first['node']} has {mine}; give all "
                    "nodes one environment (a folder that all see, or a container)"
                )


def room_here(cfg: RunConfig, device: torch.device, *, first: bool) -> dict[str, int | None]:
    """Free bytes for this process: of its GPU and, on a machine's first rank, `host` and `disk`.

    Checkpoints of an earlier run count as free, because new ones replace them.

    Raises:
        ConfigError: there is no such GPU.
    """
    import torch

    found: dict[str, int | None] = {}
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"torch sees {torch.cuda.device_count()} CUDA devices, and this rank is to use number "
                f"{device.index}; ask for as many GPUs as ranks (sbatch --gpus-per-node), or pass trainer=cpu"
            )
        found["gpu"] = torch.cuda.mem_get_info(device)[0]
    if first:
        run_dir = cfg.run_dir
        there = sum(file.stat().st_size for file in run_dir.glob("train/checkpoints/*.ckpt/*"))
        found |= {"host": host_bytes(), "disk": files.free_bytes(run_dir) + there}
    return found


def check_room(plan: RunPlan, reports: Sequence[dict[str, Any]]) -> list[str]:
    """Compare the run's minimum requirements with the free space; returns the smallest values in words.

    Args:
        plan: the run's plan.
        reports: the findings of each rank on its machine.

    Raises:
        LongtrainError: the first machine or GPU with too little space.
    """
    held = plan.held
    on_gpu = any("gpu" in report["room"] for report in reports)
    host = (held.offloaded + (0 if on_gpu else held.bytes)) * plan.layout.devices
    disk = GENERATIONS * checkpoint_bytes(plan.trained, plan.moments)
    told = {
        "disk": ("disk below run_dir", disk, "free space, or pass home=FOLDER"),
        "host": ("host memory", host, "ask for more (sbatch --mem=SIZE)"),
    }
    for report in reports:
        node, room = report["node"], report["room"]
        for key, (what, need, advice) in told.items():
            if (free := room.get(key)) is not None and free < need:
                raise LongtrainError(
                    f"{what} on node {node}: {free / GIB:.3g} GiB are free, the run needs "
                    f"{need / GIB:.3g} GiB or more; {advice}"
                )
        if (free := room.get("gpu")) is not None:
            where = f"the free part of a GPU on node {node} (nvidia-smi shows who uses the rest)"
            refuse_lack(held, free, f"the run does not fit: {where}")
    found = []
    least = {"gpu": needed(held.bytes), "host": float(host), "disk": float(disk)}
    for key, bytes_needed in least.items():
        if have := [report["room"][key] for report in reports if report["room"].get(key) is not None]:
            found.append(f"{key}={min(have) / GIB:.3g} GiB free ({bytes_needed / GIB:.3g} needed)")
    return found


def host_bytes() -> int | None:
    """Memory available to this process: the machine's free memory, within the limits of its job
    and cgroup.
    """
    import torch

    limits = [free_bytes(torch.device("cpu"))]
    megabytes = os.environ.get("SLURM_MEM_PER_NODE", "")
    limits.append(int(megabytes) * 2**20 if megabytes.isdecimal() else None)  # 0: all memory of the node
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(filter(None, limits), default=None)


def _all_reduce(backend: str, device: torch.device, rank: Rank) -> str:
    """Time an all-reduce between all ranks: the slowest rank's best of several runs, in words."""
    took: dict[str, Any] = {"node": provenance.machine_name(), "seconds": None, "error": ""}

    def work() -> None:
        try:
            took["seconds"] = _reduced(backend, device, rank.world)
        except Exception as error:
            took["error"] = " ".join(str(error).split())[:200] or type(error).__name__

    thread = Thread(target=work, daemon=True)  # NCCL may wait forever
    thread.start()
    thread.join(SECONDS)
    found = _gathered(took, rank)
    try:
        _refuse_reduced(backend, found)
    except LongtrainError as error:
        if not thread.is_alive():
            raise
        if not rank.number:
            sys.stderr.write(f"longtrain: error: {error}\n")
            sys.stderr.flush()
        os._exit(1)  # the waiting thread would block a normal exit
    seconds, size = max(one["seconds"] for one in found), MEBIBYTES[backend]
    speed = size / 1024 / seconds
    return f"all_reduce={backend} {size} MiB in {1e3 * seconds:.1f} ms ({speed:.3g} GiB/s)"


def _refuse_reduced(backend: str, found: Sequence[dict[str, Any]]) -> None:
    """Raise if the all-reduce failed or did not finish on any rank."""
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    debug = "; NCCL_DEBUG=INFO shows what it tries" if backend == "nccl" else ""
    for number, one in enumerate(found):
        if one["seconds"] is None:
            why = f"failed: {one['error']}" if one["error"] else f"did not end within {SECONDS:g} s"
            raise LongtrainError(
                f"all-reduce over {backend} on rank {number} (node {one['node']}) {why}; set {variable} to "
                f"the network interface between the nodes (ip addr lists them){debug}"
            )


def _reduced(backend: str, device: torch.device, world: int) -> float:
    """Seconds of the fastest of several float32 all-reduces, whose sum is checked."""
    import torch
    from torch import distributed

    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = distributed.new_group(backend=backend, timeout=timedelta(seconds=SECONDS))
    numbers = torch.empty(MEBIBYTES[backend] * 2**20 // 4, device=device)
    best = float("inf")
    for _ in range(4):  # the first one also opens the connections
        numbers.fill_(float(distributed.get_rank() + 1))
        start = time.perf_counter()
        distributed.all_reduce(numbers, group=group)
        outputs = world * (world + 1) / 2
        right = bool((numbers == outputs).all())  # synchronises with the device
        best = min(best, time.perf_counter() - start)
        if not right:
            raise LongtrainError(f"the sum is {float(numbers[0])}, not {outputs}")
    return best
