r"""Training on 1 to N GPUs of this host: `python -m benchmarks.scaling --folder FOLDER`.

Each number of GPUs trains the same steps with the same global batch; the result has tokens a second, the
largest difference of a loss from the run on the fewest GPUs, and each rank's peak memory beside the plan's.
With `--kill` three more runs on the most GPUs, with deterministic kernels, say whether a run whose rank was
killed and that was started again is bit for bit one that was not. `--trainer cpu` rehearses it over gloo.

FOLDER/scaling.json is written after every run. A run that fails, or takes longer than `--timeout`, is noted
there, and the others go on. What is there already is not measured again, so a second call with the same
settings adds GPUs or `--kill`. Words after `--` go to every run:

    python -m benchmarks.scaling --recipe eagle3_llama8b --trainer deepspeed_zero2 --kill
    python -m benchmarks.scaling --recipe eagle3_llama70b --shape llama33_70b --tokens 32768 65536 131072 \
        --trainer deepspeed_zero2 --devices 4 8 -- target.shard=fsdp2 method.chunk_tokens=2048
    python -m benchmarks.scaling --trainer cpu --recipe longspec_tiny --shape tiny --tokens 128 --kill
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from longtrain import provenance
from longtrain.assets import asset_dir
from longtrain.files import as_json, read_json, write_files
from longtrain.targets.shapes import SHAPES
from longtrain.training import checkpoint, table

SETTINGS = ("recipe", "shape", "tokens", "sequences", "steps", "trainer", "words")
"""What the figures of one FOLDER have in common."""


class RunError(Exception):
    """A run ended with an error, or did not end."""


def prepared(place: Path, asked: argparse.Namespace) -> list[str]:
    """Write the target's config and the data; return the words that every run takes."""
    place.mkdir(parents=True, exist_ok=True)
    tiny, target = asset_dir("bundled") / "tiny", ["target=tiny"]
    shape = read_json(tiny / "config.json") if asked.shape == "tiny" else SHAPES[asked.shape]
    if asked.shape != "tiny":
        shutil.copytree(tiny, place / "target", dirs_exist_ok=True, ignore=shutil.ignore_patterns("weights*"))
        (place / "target" / "config.json").write_text(json.dumps(shape))
        target = [f"target.path={place / 'target'}", "target.weights=random", "init=null"]
    # the tokenizer is the bundled one whatever the shape, and data holds only tokens that a tokenizer knows
    rng, known = random.Random(0), read_json(tiny / "config.json")["vocab_size"]
    with (place / "tokens.jsonl").open("w") as file:
        for _ in range(16):
            ids = [rng.randrange(known) for _ in range(max(asked.tokens))]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    stage = "{{steps: {0}, sequence_tokens: {1}, doc_tokens: {1}}}"
    stages = ", ".join(stage.format(asked.steps, tokens) for tokens in asked.tokens)
    return [
        *(f"+recipe={asked.recipe}", f"home={place}", *target, "data=excerpt", "data.name=ids"),
        f"data.sources=[{{tokenised: {place / 'tokens.jsonl'}, split: train}}]",
        *(f"data.stages=[{stages}]", f"trainer.max_steps={asked.steps * len(asked.tokens)}"),
        *(f"trainer.sequences_per_step={asked.sequences}", "trainer.accumulate_grad_batches=1"),
        *("data.min_doc_tokens=2", "trainer.val_every=0", "trainer.log_every=1"),
        *("optim.warmup_ratio=0.0", "callbacks.progress=false", "callbacks.curves=false"),
        *(f"trainer={asked.trainer}", *(["trainer.strategy=ddp"] if asked.trainer == "cpu" else [])),
        *asked.words,
    ]


def command(job: str, words: list[str], devices: int, name: str) -> list[str]:
    """Return the command of a job on some devices."""
    return [sys.executable, "-m", "longtrain", job, *words, f"trainer.devices={devices}", f"name={name}"]


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own; no rank of it outlives this, whatever failed."""
    process = subprocess.Popen(words, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a command that `started` has; return its status.

    Raises:
        RunError: it did not end in time.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"no end after {seconds:g} s, killed: {shlex.join(process.args)}; more: --timeout"  # type: ignore[arg-type]
        ) from None


def ran(words: list[str], seconds: float) -> None:
    """Run a command.

    Raises:
        RunError: it failed (its own error was printed), or did not end in time.
    """
    with started(words) as process:
        if status := ended(process, seconds):
            raise RunError(f"status {status} of {shlex.join(words)}")


def measured(place: Path, words: list[str], devices: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Train on some devices, and plan the same meanwhile; return the figures of each stage and all losses."""
    name, plan = f"on-{devices}", place / f"plan-{devices}.json"
    words = [*words, "trainer.checkpoint_every_minutes=0"]
    train, began = command("train", [*words, "resume=never"], devices, name), time.monotonic()
    with started(command("plan", [*words, f"json={plan}"], devices, name)) as planning:
        ran(train, asked.timeout)
        seconds = time.monotonic() - began
        if status := ended(planning, asked.timeout):
            raise RunError(f"status {status} of the plan on {devices} devices")
    folder, stages = place / "runs" / name / "train", []
    speed, summary = table.read(folder / "speed.csv"), read_json(folder / "summary.json")
    for number, stage in enumerate(read_json(plan)["stages"]):
        rows, tokens = speed[number * asked.steps : (number + 1) * asked.steps], stage["sequence_tokens"]
        step_s = statistics.median(float(row["seconds_per_step"]) for row in rows[1:] or rows)
        found = {"sequence_tokens": tokens, "step_s": step_s, "plan_step_s": stage.get("step_s")}
        found["tokens_per_s"] = asked.sequences * tokens / step_s
        found["peak_bytes"] = float(rows[-1]["peak_memory_bytes"])
        stages.append({**found, "plan_peak_bytes": stage["memory_bytes"]["peak"]})
    return {
        "devices": devices,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(min(devices, torch.cuda.device_count()))],
        "command": shlex.join(train[1:]),
        "seconds": seconds,
        "peak_bytes_by_rank": summary["peak_memory_bytes_by_rank"],
        "gather_wait_share": summary["gather_wait_share"],
        "stages": stages,
        "losses": [float(row["train/loss"]) for row in table.read(folder / "metrics.csv")],
    }


def compare_with_fewest(runs: list[dict[str, Any]]) -> None:
    """Order runs by devices; add to each its speedup over the first and its largest difference of a loss."""
    runs.sort(key=lambda run: run["devices"])
    for run in runs:
        pairs = zip(run["losses"], runs[0]["losses"], strict=True)
        run["largest_relative_difference_of_a_loss"] = max(abs(a - b) / abs(b) for a, b in pairs)
        for stage, fewest in zip(run["stages"], runs[0]["stages"], strict=True):
            stage["speedup"] = stage["tokens_per_s"] / fewest["tokens_per_s"]


def killed(place: Path, words: list[str], devices: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Train once; again, and kill the last rank after a checkpoint; run that command again, and compare."""
    whole, cut = (place / "runs" / f"{name}-{devices}" / "train" for name in ("whole", "killed"))
    half = max(asked.steps // 2, 1)
    words = [*words, "trainer.deterministic=true", f"trainer.checkpoint_every_steps={half}"]
    ran(command("train", [*words, "resume=never"], devices, whole.parent.name), asked.timeout)
    shutil.rmtree(cut.parent, ignore_errors=True)
    train = command("train", words, devices, cut.parent.name)
    with started(train) as process:
        end = time.monotonic() + asked.timeout
        while len(table.read(cut / "metrics.csv")) <= half:
            if process.poll() is not None:
                raise RunError(
                    f"the run ended with {process.returncode} before it could be killed; more: --steps"
                )
            if time.monotonic() > end:
                raise RunError(f"no step {half + 1} after {asked.timeout:g} s: {shlex.join(train)}")
            time.sleep(0.02)
        os.kill(rank_of(process.pid, devices - 1), signal.SIGKILL)
        began = time.monotonic()
        found: dict[str, Any] = {"command": shlex.join(train[1:]), "killed_rank": devices - 1}
        found |= {"status": ended(process, asked.timeout)}
        found |= {"devices": devices, "seconds_until_it_ended": time.monotonic() - began}
    ran(train, asked.timeout)
    return found | compared(whole, cut)


def compared(whole: Path, cut: Path) -> dict[str, bool]:
    """Say which files of two runs have the same bits: weights, optimizer, metrics."""
    found = {"same metrics": (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()}
    states = [checkpoint.read(folder / "checkpoints" / "last.ckpt") for folder in (whole, cut)]
    for file in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        mine, theirs = (state.tensors(file) for state in states)
        found[f"same {file}"] = set(mine) == set(theirs) and all(
            torch.equal(mine[x], theirs[x]) for x in mine
        )
    return found


def rank_of(parent: int, rank: int) -> int:
    """Return the process of a rank other than the first, which is the command and starts the others.

    Raises:
        RunError: there is none.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # one that ended meanwhile, or another user's
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            environment = (folder / "environ").read_bytes().split(b"\0")
            if int(after_name[1]) == parent and f"LOCAL_RANK={rank}".encode() in environment:
                return int(folder.name)
    raise RunError(f"process {parent} has no rank {rank}: it ended")


def main() -> None:
    """Run everything that FOLDER/scaling.json lacks, and print a line for each run.

    Raises:
        SystemExit: FOLDER has figures of other settings, or a run failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="longspec_llama8b_long")
    parser.add_argument("--shape", default="llama31_8b", help="of the random target; tiny: the bundled one")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], help="GPUs, in this order")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="of sequences, a stage each")
    parser.add_argument("--sequences", type=int, default=8, help="packed sequences of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each stage")
    parser.add_argument("--folder", type=Path, default=Path("scaling"))
    parser.add_argument("--trainer", default="ddp", help="of conf/trainer; cpu: ranks over gloo")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one run may take")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    if asked.kill and max(asked.devices) < 2:
        parser.error(f"--kill needs a run on 2 GPUs or more, not --devices {max(asked.devices)}")
    place = asked.folder.absolute()
    settings = {name: getattr(asked, name) for name in SETTINGS}
    result: dict[str, Any] = {"settings": settings, "runs": [], "killed": []}
    if (place / "scaling.json").exists():
        before = read_json(place / "scaling.json")
        if before.get("settings") != settings:
            parser.error(f"{place} is of other settings, {before.get('settings')}; pass another --folder")
        result |= {"runs": before["runs"], "killed": before["killed"]}
    failed = result["failed"] = []
    words = prepared(place, asked)

    def add(kind: str, devices: int, run: Callable[..., dict[str, Any]]) -> None:
        if any(one["devices"] == devices for one in result[kind]):
            return
        try:
            found = run(place, words, devices, asked)
        except RunError as error:
            failed.append({"devices": devices, "error": str(error)})
            sys.stderr.write(f"{error}\n")
        else:
            result[kind].append(found)
            compare_with_fewest(result["runs"])
            sys.stdout.write(f"{json.dumps({**found, 'losses': None})}\n")
            sys.stdout.flush()
            found["provenance"] = provenance.gather()  # a later call may be of another commit
        write_files(place, {"scaling.json": as_json(result)})

    for devices in asked.devices:
        add("runs", devices, measured)
    if asked.kill:
        add("killed", max(asked.devices), killed)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; the others are in {place / 'scaling.json'}")


if __name__ == "__main__":
    main()
