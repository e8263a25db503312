"""A real Slurm in a temporary folder: one controller and two nodes on this machine, as root or not.

The first node bears this machine's name, which resolves already, so that `/etc/hosts` is left alone; nobody
connects to the second one by name.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")

CONF = """\
ClusterName=longtrain
SlurmctldHost={nodes[0]}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=60
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=4096 Gres=gpu:1
NodeName={nodes[0]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""
"""A requeued job starts again after `cred_expire` seconds: 120 where nobody says so, 5 at least."""


@dataclass
class Cluster:
    """A Slurm that runs.

    Args:
        folder: its configuration, state and logs.
        nodes: names of its two nodes.
        env: the environment in which its commands find it.
        work: the folder that jobs are submitted from; their logs and outputs are in it.
    """

    folder: Path
    nodes: tuple[str, str]
    env: dict[str, str]
    work: Path = field(default_factory=Path)

    def call(self, *words: str) -> str:
        """Stdout of one of Slurm's commands."""
        done = subprocess.run(words, env=self.env, cwd=self.work, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str) -> str:
        """The id of a job that `sbatch` takes with these words."""
        return self.call("sbatch", "--parsable", *words)

    def about(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, what: Callable[[], bool], job: str, *, seconds: float = 240) -> None:
        """Wait until something is so; an error that shows the job and its logs when it takes too long."""
        end = time.monotonic() + seconds
        while not what():
            about = self.about(job)
            late = time.monotonic() > end
            ended = about["JobState"] in ("FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED")
            if late or (ended and not what()):
                pytest.fail(f"job {job}: {about['JobState']} {about['Reason']}\n{self.logs()}")
            time.sleep(0.3)

    def finish(self, job: str, *, seconds: float = 240) -> None:
        """Wait until a job has ended well."""
        self.wait(lambda: self.about(job)["JobState"] == "COMPLETED", job, seconds=seconds)

    def logs(self) -> str:
        """Every log of jobs and ranks, one after the other."""
        files = sorted(self.work.rglob("*.log"), key=lambda file: (len(file.parts), file))
        return "".join(f"==> {file.relative_to(self.work)} <==\n{file.read_text()}\n" for file in files)


@pytest.fixture(scope="session")
def slurm_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Munge, controller and nodes, started once; whatever they started is ended with them."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(
            f"needs a Slurm to start (apt-get install slurm-wlm munge); missing: {', '.join(missing)}"
        )
    folder = tmp_path_factory.mktemp("slurm")
    name = socket.gethostname().split(".")[0]
    nodes = (name, f"{name}-second")
    values = {"folder": folder, "nodes": nodes, "ports": _ports(3), "user": getpass.getuser()}
    (folder / "slurm.conf").write_text(CONF.format(**values))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    env |= {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    own = [f"--{key}={folder}/munge.{key.split('-')[0]}" for key in ("key-file", "socket", "pid-file")]
    own += [f"--{key}={folder}/munge.{key.split('-')[0]}" for key in ("log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", *own],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in nodes),
    ]
    cluster = Cluster(folder, nodes, env)
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "daemons.log").open("wb") as log:
            for words in commands:
                started.append(
                    subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
                )
                time.sleep(0.5)
        _wait_for_nodes(cluster, started)
        yield cluster
    finally:
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
        for daemon in started:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.fixture
def slurm(slurm_daemons: Cluster, tmp_path: Path, root: Path) -> Iterator[Cluster]:
    """The cluster with a folder of its own for one test's jobs; they are cancelled at the end."""
    env = {
        **slurm_daemons.env,
        "PATH": f"{Path(sys.executable).parent}:{slurm_daemons.env['PATH']}",
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    cluster = Cluster(slurm_daemons.folder, slurm_daemons.nodes, env, tmp_path)
    yield cluster
    if jobs := cluster.call("squeue", "--noheader", "--format=%A").split():
        cluster.call("scancel", *jobs)
    end = time.monotonic() + 60  # what is left of a job outlives the daemons
    while cluster.call("squeue", "--noheader", "--format=%A") and time.monotonic() < end:
        time.sleep(0.5)


def _ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait_for_nodes(cluster: Cluster, started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until both nodes are idle; skip with what a daemon said where one does not start here."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if any(daemon.poll() is not None for daemon in started):
            break
        words = ["sinfo", "--noheader", "--Node", "--format=%T", "--partition=main"]
        found = subprocess.run(words, env=cluster.env, capture_output=True, text=True)
        if found.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.5)
    lines = (cluster.folder / "daemons.log").read_text().strip().splitlines()
    said = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()] or lines
    pytest.skip(f"Slurm does not start here: {said[-1] if said else 'its daemons said nothing'}")
