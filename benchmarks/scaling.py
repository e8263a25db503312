r"""Training on 1 to N GPUs of this host: `python -m benchmarks.scaling --folder FOLDER`.

Each number of GPUs trains the same steps with the same global batch; the result has tokens a second, the
largest difference of a loss from the first run's, and the peak memory of each rank beside the plan's. With
`--kill` the run on the most GPUs is repeated, one of its ranks is killed, and what the same command then
makes of it is compared bit for bit. `--trainer cpu` rehearses it over gloo. Words after `--` go to every run:

    python -m benchmarks.scaling --recipe eagle3_llama8b --trainer deepspeed_zero2 --kill
    python -m benchmarks.scaling --recipe eagle3_llama70b --shape llama33_70b --tokens 32768 65536 131072 \
        --trainer deepspeed_zero2 --devices 4 8 -- target.shard=fsdp2 method.chunk_tokens=2048
    python -m benchmarks.scaling --trainer cpu --recipe longspec_tiny --shape tiny --tokens 256 --kill
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from longtrain import provenance
from longtrain.assets import asset_dir
from longtrain.files import as_json, read_json, write_files
from longtrain.targets.shapes import SHAPES
from longtrain.training import checkpoint, table


def prepared(place: Path, asked: argparse.Namespace) -> list[str]:
    """Write the target's config and the data; return the words that every run takes."""
    place.mkdir(parents=True, exist_ok=True)
    tiny, target = asset_dir("bundled") / "tiny", ["target=tiny"]
    shape = read_json(tiny / "config.json") if asked.shape == "tiny" else SHAPES[asked.shape]
    if asked.shape != "tiny":
        shutil.copytree(tiny, place / "target", dirs_exist_ok=True, ignore=shutil.ignore_patterns("weights*"))
        (place / "target" / "config.json").write_text(json.dumps(shape))
        target = [f"target.path={place / 'target'}", "target.weights=random", "init=null"]
    rng = random.Random(0)
    with (place / "tokens.jsonl").open("w") as file:
        for _ in range(16):
            ids = [rng.randrange(shape["vocab_size"]) for _ in range(max(asked.tokens))]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    stage = "{{steps: {0}, sequence_tokens: {1}, doc_tokens: {1}}}"
    stages = ", ".join(stage.format(asked.steps, tokens) for tokens in asked.tokens)
    return [
        *(f"+recipe={asked.recipe}", f"home={place}", *target, "data=excerpt", "data.name=ids"),
        f"data.sources=[{{tokenised: {place / 'tokens.jsonl'}, split: train}}]",
        *(f"data.stages=[{stages}]", f"trainer.max_steps={asked.steps * len(asked.tokens)}"),
        *(f"trainer.sequences_per_step={asked.sequences}", "trainer.accumulate_grad_batches=1"),
        *("data.min_doc_tokens=2", "trainer.val_every=0", "trainer.log_every=1"),
        f"trainer.deterministic={asked.kill}",
        f"trainer.checkpoint_every_steps={max(asked.steps // 2, 1)}",
        *("optim.warmup_ratio=0.0", "callbacks.progress=false", "callbacks.curves=false"),
        *(f"trainer={asked.trainer}", *(["trainer.strategy=ddp"] if asked.trainer == "cpu" else [])),
        *asked.words,
    ]


def command(job: str, words: list[str], devices: int, name: str) -> list[str]:
    """Return the command of a job on some devices."""
    return [sys.executable, "-m", "longtrain", job, *words, f"trainer.devices={devices}", f"name={name}"]


def ran(words: list[str]) -> None:
    """Run a command; its own error was printed, so one line says which command failed."""
    if status := subprocess.run(words, check=False).returncode:
        raise SystemExit(f"status {status} of {shlex.join(words)}")


def measured(place: Path, words: list[str], devices: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Train on some devices and plan the same; return the figures of each stage and all losses."""
    name, plan = f"on-{devices}", place / f"plan-{devices}.json"
    train = command("train", [*words, "resume=never"], devices, name)
    ran(train)
    ran(command("plan", [*words, f"json={plan}"], devices, name))
    folder, stages = place / "runs" / name / "train", []
    speed = table.read(folder / "speed.csv")
    for number, stage in enumerate(read_json(plan)["stages"]):
        rows, tokens = speed[number * asked.steps : (number + 1) * asked.steps], stage["sequence_tokens"]
        seconds = statistics.median(float(row["seconds_per_step"]) for row in rows[1:] or rows)
        found = {"sequence_tokens": tokens, "step_s": seconds, "plan_step_s": stage.get("step_s")}
        found["tokens_per_s"] = asked.sequences * tokens / seconds
        found["peak_bytes"] = float(rows[-1]["peak_memory_bytes"])
        stages.append({**found, "plan_peak_bytes": stage["memory_bytes"]["peak"]})
    losses = [float(row["train/loss"]) for row in table.read(folder / "metrics.csv")]
    peaks = read_json(folder / "summary.json")["peak_memory_bytes_by_rank"]
    made = {"devices": devices, "command": shlex.join(train[1:]), "peak_bytes_by_rank": peaks}
    return made | {"stages": stages, "losses": losses}


def killed(place: Path, words: list[str], devices: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Kill the last rank after the first checkpoint, run the command again, and compare with the whole."""
    whole, cut = (place / "runs" / name / "train" for name in (f"on-{devices}", f"killed-{devices}"))
    shutil.rmtree(cut.parent, ignore_errors=True)
    train = command("train", words, devices, cut.parent.name)
    process = subprocess.Popen(train, start_new_session=True)
    try:
        while len(table.read(cut / "metrics.csv")) <= asked.steps // 2:
            if process.poll() is not None:
                raise SystemExit(f"the run ended with {process.returncode} before it could be killed")
            time.sleep(0.02)
        os.kill(rank_of(process.pid, devices - 1), signal.SIGKILL)
        began = time.monotonic()
        found: dict[str, Any] = {"command": shlex.join(train[1:]), "killed_rank": devices - 1}
        found |= {"status": process.wait(300), "seconds_until_it_ended": time.monotonic() - began}
    finally:
        # no rank outlives this, whatever failed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    ran(train)
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
    """Return the process of a rank other than the first, which is the command and starts the others."""
    with suppress(FileNotFoundError):  # one that ended meanwhile
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    raise SystemExit(f"process {parent} has no rank {rank}: it ended, or Linux does not list its children")


def main() -> None:
    """Run everything, print a line for each number of devices, and write FOLDER/scaling.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="longspec_llama8b_long")
    parser.add_argument("--shape", default="llama31_8b", help="of the random target; tiny: the bundled one")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="of sequences, a stage each")
    parser.add_argument("--sequences", type=int, default=8, help="packed sequences of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each stage")
    parser.add_argument("--folder", type=Path, default=Path("scaling"))
    parser.add_argument("--trainer", default="ddp", help="of conf/trainer; cpu: ranks over gloo")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    if asked.kill and max(asked.devices) < 2:
        parser.error(f"--kill needs a run on 2 GPUs or more, not --devices {max(asked.devices)}")
    place = asked.folder.absolute()
    words = prepared(place, asked)
    runs: list[dict[str, Any]] = []
    result = {**provenance.gather(), "runs": runs}
    for devices in asked.devices:
        runs.append(measured(place, words, devices, asked))
        pairs = zip(runs[-1]["losses"], runs[0]["losses"], strict=True)
        runs[-1]["largest_relative_difference_of_a_loss"] = max(abs(a - b) / abs(b) for a, b in pairs)
        for stage, alone in zip(runs[-1]["stages"], runs[0]["stages"], strict=True):
            stage["speedup"] = stage["tokens_per_s"] / alone["tokens_per_s"]
        if asked.kill and devices == max(asked.devices):
            runs[-1]["killed"] = killed(place, words, devices, asked)
        sys.stdout.write(f"{json.dumps({**runs[-1], 'losses': None})}\n")
        write_files(place, {"scaling.json": as_json(result)})


if __name__ == "__main__":
    main()
