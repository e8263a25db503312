"""`longtrain preflight`: what a training run needs is tried on every rank, and one line says how it stands.

In this order: the ranks come, their versions are alike, they see one folder, target and prepared data are
there, disk and memory hold what the run needs, and all ranks add numbers up over NCCL (gloo on CPUs).
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longtrain import files, methods, provenance
from longtrain.errors import ConfigError, LongtrainError
from longtrain.jobs import outline
from longtrain.jobs.outline import devices_of
from longtrain.jobs.preflight_needs import Needs, Room, needs_of, room_here
from longtrain.jobs.preflight_ranks import GO, STOP, Meeting, Rank, start_others
from longtrain.jobs.setup import plain, target_key, target_overrides
from longtrain.settings import Count, Positive, convert
from longtrain.tables import say

MARK = ".preflight"
MEBIBYTES = {"nccl": 256, "gloo": 16}
SEEN_SECONDS = 5.0
"""How long another node may take to see a file that rank 0 wrote."""


def run(cfg: DictConfig) -> None:
    """Try what training needs; the last line is `preflight ok: ...`, or rank 0's error.

    Raises:
        LongtrainError: the first thing that is wrong, and what to do.
        SystemExit: with code 1 on other ranks, when rank 0 says so.
    """
    seconds = convert(cfg.timeout_s, Positive, "timeout_s")
    rank, others = _ranks(cfg)
    meeting = Meeting(rank, seconds)
    if rank.number:
        meeting.obey("mark")
        seen = _sees(Path(cfg.run_dir) / MARK, meeting.store.get("token").decode())
        meeting.tell("report", {**_report(cfg, rank), "seen": seen})
        meeting.obey("go")
        meeting.all_reduce(_backend(cfg), _device(cfg, rank), mebibytes=MEBIBYTES[_backend(cfg)])
        return
    try:
        line = _lead(cfg, meeting)
    except LongtrainError as error:
        for key in ("mark", "go", "end"):
            meeting.store.set(key, STOP)
        time.sleep(1.0)  # the store ends with this process: let the others read it
        if meeting.stuck:
            sys.stderr.write(f"longtrain: error: {error}\n")
            sys.stderr.flush()
            os._exit(1)  # the thread that waits in the all-reduce would hold up the end
        raise
    for other in others:
        other.wait()
    say(line)


def _lead(cfg: DictConfig, meeting: Meeting) -> str:
    """What rank 0 does; the line to end with."""
    rank, mark = meeting.rank, Path(cfg.run_dir) / MARK
    token = secrets.token_hex(8)
    files.write_text(mark, token)
    meeting.store.set("token", token)
    meeting.store.set("mark", GO)
    try:
        meeting.tell("report", {**_report(cfg, rank), "seen": True})
        found = meeting.collect("report")
    finally:
        mark.unlink(missing_ok=True)
    reports = [found[number] for number in range(rank.world)]
    _check_alike(reports)
    for report in reports:
        if not report["seen"]:
            raise LongtrainError(
                f"node {report['node']} does not see what node {rank.node} writes in run_dir={cfg.run_dir}; "
                "put it on a file system that all nodes share: home=FOLDER"
            )
        if report["problem"]:
            raise LongtrainError(f"node {report['node']}: {report['problem']}")
    needs = needs_of(cfg, rank)
    rooms = [(str(report["node"]), Room(**report["room"])) for report in reports]
    needs.check(rooms)
    backend = _backend(cfg)
    meeting.store.set("go", GO)
    took = meeting.all_reduce(backend, _device(cfg, rank), mebibytes=MEBIBYTES[backend])
    meeting.store.set("end", GO)
    return _line(reports, rooms, needs, f"all_reduce={backend} {_reduced(backend, took)}")


def _ranks(cfg: DictConfig) -> tuple[Rank, list[Any]]:
    """This process among the ranks, and the processes started here because nobody else started them."""
    rank, nodes = Rank.here(), convert(cfg.trainer.num_nodes, Count, "trainer.num_nodes")
    wanted = devices_of(cfg) * nodes
    launched = "WORLD_SIZE" in os.environ or "SLURM_PROCID" in os.environ
    starts = not launched and wanted > 1 and nodes == 1
    _check_settings(cfg, wanted if starts else rank.world)
    if not starts:
        return rank, []
    others, rank = start_others(wanted)
    return rank, others


def _check_settings(cfg: DictConfig, world: int) -> None:
    """Method, target, the number of ranks, and what must divide by it.

    Raises:
        ConfigError: one is not chosen, another number of ranks was started than the settings say, rows of a
            step do not divide, or the strategy cannot train or is not installed.
    """
    from longtrain.training.strategy import rows_of_a_rank
    from longtrain.training.zero import check_installed

    has_target = bool(cfg.target and cfg.target.path)
    if cfg.method is None or (not has_target and methods.get(str(cfg.method.name)).export is None):
        raise ConfigError("preflight needs a method and a target; pass the words of train: +recipe=NAME")
    per_node, nodes = devices_of(cfg), int(cfg.trainer.num_nodes)
    if per_node * nodes != world:
        raise ConfigError(
            f"trainer.devices={plain(cfg.trainer.devices)} and trainer.num_nodes={nodes} make "
            f"{per_node * nodes} ranks, and {world} were started; pass trainer.devices=(those of a "
            "node) and trainer.num_nodes=(nodes), or start as many"
        )
    rows = convert(plain(cfg.trainer.rows_per_step), Count | None, "trainer.rows_per_step")
    each = convert(plain(cfg.trainer.accumulate_grad_batches), Count, "trainer.accumulate_grad_batches")
    rows_of_a_rank(rows, each, ranks=world)
    outline.layout_of(cfg, devices=per_node, nodes=nodes)
    check_installed(plain(cfg.trainer.strategy))


def _backend(cfg: DictConfig) -> str:
    import torch

    accelerator = str(cfg.trainer.accelerator)
    cuda = accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())
    return "nccl" if cuda else "gloo"


def _device(cfg: DictConfig, rank: Rank) -> Any:
    import torch

    devices = plain(cfg.trainer.devices)
    number = devices[rank.local] if isinstance(devices, list) else rank.local
    return torch.device("cuda", int(number)) if _backend(cfg) == "nccl" else torch.device("cpu")


def _report(cfg: DictConfig, rank: Rank) -> dict[str, Any]:
    """What one rank finds where it runs, as JSON values; `problem` is the first thing that is wrong."""
    facts = provenance.gather()
    commit = (facts["git"] or {}).get("commit", "")
    versions = {**facts["versions"], "cuda": str(facts["machine"].get("cuda")), "commit": commit}
    report = {"node": rank.node, "versions": versions, "problem": "", "room": asdict(Room()), "data": ""}
    try:
        report["room"] = asdict(room_here(cfg, _device(cfg, rank), first=rank.local == 0))
        if rank.local == 0:  # the others of a machine see the same files
            report["data"] = _files_here(cfg)
    except (LongtrainError, OSError, RuntimeError) as error:
        report["problem"] = " ".join(str(error).split())
    return report


def _files_here(cfg: DictConfig) -> str:
    """Target and prepared data are on this machine; what the data are, in a few words.

    Raises:
        ConfigError: no target is chosen, it is not here or has no tokenizer, or features are to be read and
            there are none.
        ArtifactError: a file of the target is missing.
        DataError: the data are not prepared, or damaged.
    """
    from longtrain.data.rows.prepare import tokenizer_hash
    from longtrain.data.rows.prepared import Prepared
    from longtrain.jobs.features import check_filled, settings_of
    from longtrain.jobs.prepare import data_config
    from longtrain.targets.at_hand import folder_at_hand
    from longtrain.targets.tokenizer import read_tokenizer

    spec = methods.get(str(cfg.method.name))
    if spec.export is None:
        folder_at_hand(str(cfg.target.path), weights=target_key(cfg, "weights") == "stored")
        check_filled(settings_of(cfg))
    if spec.data is not None:
        return "its own"
    config = data_config(cfg)
    tokenizer, _ = read_tokenizer(str(cfg.target.path), **target_overrides(cfg))
    folder = Path(cfg.home) / "data" / f"{config.name}-{tokenizer_hash(tokenizer)[:8]}"
    return f"{folder.name} ({Prepared.open(folder).manifest['counts']['tokens']} tokens)"


def _sees(mark: Path, token: str) -> bool:
    """Whether rank 0's mark is there; shared file systems may show it late."""
    end = time.monotonic() + SEEN_SECONDS
    while time.monotonic() < end:
        if mark.exists() and mark.read_text() == token:
            return True
        time.sleep(0.2)
    return False


def _check_alike(reports: list[dict[str, Any]]) -> None:
    """Raises LongtrainError where a rank runs other versions than rank 0."""
    first = reports[0]
    for report in reports[1:]:
        names = sorted({*first["versions"], *report["versions"]})
        for name in names:
            mine, theirs = first["versions"].get(name), report["versions"].get(name)
            if mine != theirs:
                raise LongtrainError(
                    f"node {report['node']} has {name} {theirs}, node {first['node']} has {mine}; give all "
                    "nodes one environment (a folder that all see, or a container)"
                )


def _reduced(backend: str, seconds: float) -> str:
    size = MEBIBYTES[backend]
    return f"{size} MiB in {1e3 * seconds:.1f} ms ({size / 1024 / seconds:.3g} GiB/s)"


def _line(
    reports: Iterable[dict[str, Any]], rooms: list[tuple[str, Room]], needs: Needs, reduced: str
) -> str:
    """The line of a preflight that found nothing wrong."""
    told = list(reports)
    nodes = list(dict.fromkeys(report["node"] for report in told))
    versions = told[0]["versions"]
    words = [f"ranks={len(told)}", f"nodes={len(nodes)}", reduced, *needs.words([room for _, room in rooms])]
    words += [f"data={told[0]['data']}", f"torch={versions['torch']}", f"longtrain={versions['longtrain']}"]
    return "preflight ok: " + " ".join(words)
