"""What checksums cost: `python -m tests.hostile.speed BEFORE AFTER --target FOLDER --json FILE`.

Loads and start-ups of two checkouts are timed in turn, each in a fresh process, so that both see the same
machine. Medians of CPU seconds (user and system) are compared, since other programs take the wall's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LOADS = {
    "load tiny_longspec": "from longtrain.artifact import Artifact|Artifact.load('tiny_longspec')",
    "load tiny_lookaheadkv": "from longtrain.artifact import Artifact|Artifact.load('tiny_lookaheadkv')",
    "load and verify tiny_lookaheadkv": "from longtrain.artifact import Artifact\n"
    "from longtrain.targets.loading import load_target\n"
    "target = load_target('tiny', dtype='bfloat16', device='cpu')|"
    "Artifact.load('tiny_lookaheadkv').build(target)",
    "load the target": "from longtrain.targets.loading import load_target|"
    "load_target('TARGET', dtype='float32', device='cpu')",
    "open prepared data, 4M tokens": "import numpy as np, pathlib, tempfile\n"
    "from longtrain.data.rows.prepared import Prepared, PreparedWriter\n"
    "place = pathlib.Path(tempfile.mkdtemp(dir='PLACE'))\n"
    "writer = PreparedWriter(place, 1000)\n"
    "ids = np.arange(10_000) % 900\n"
    "for n in range(400): writer.add(ids, ids >= 0, name=str(n), kind='t', val=False)\n"
    "source = {'source': {'reader': 'text', 'where': 'x'}, 'inputs': {'files': []}}\n"
    "writer.close({'weights': [1.0], 'pad_id': 0, 'sources': [source], 'fingerprint': 'f', 'name': 'x'})|"
    "Prepared.open(place)",
}
"""What is timed -> what is done before, and what is timed, in one process."""

COMMANDS = {"longtrain --help": ["--help"], "longtrain inspect": ["inspect", "artifact=tiny_longspec"]}
"""What is timed -> the words of a command."""

CODE = """{before}
import resource
def spent():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
{work}
began = spent()
for _ in range({times}):
    {work}
print((spent() - began) / {times})
"""


def seconds(checkout: Path, what: str, *, target: str, place: str) -> float:
    """CPU seconds of one of `LOADS` or `COMMANDS` in a checkout."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if what in LOADS:
        before, work = LOADS[what].replace("TARGET", target).replace("PLACE", place).split("|")
        times = 2 if "target" in what else 5
        code = CODE.format(before=before, work=work, times=times)
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=place, check=True, capture_output=True, text=True
        )
        return float(done.stdout.split()[-1])
    child = os.fork()
    if child == 0:  # so that the command's own children are counted, and nobody else's
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.chdir(place)
        os.execve(sys.executable, [sys.executable, "-m", "longtrain", *COMMANDS[what]], env)
    _, status, used = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, what
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Time both checkouts in turn, and print and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--target", required=True, help="a folder of a target")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        for what in [*LOADS, *COMMANDS]:
            times: dict[str, list[float]] = {"before": [], "after": []}
            for _ in range(asked.runs):
                for name in times:
                    checkout = getattr(asked, name).resolve()
                    times[name].append(seconds(checkout, what, target=asked.target, place=place))
            found[what] = {name: statistics.median(some) for name, some in times.items()}
            found[what]["ratio"] = found[what]["after"] / found[what]["before"]
            sys.stdout.write(
                f"{what:<34}" + "".join(f"{value:>10.4f}" for value in found[what].values()) + "\n"
            )
            sys.stdout.flush()
    if asked.json:
        about = {"unit": "CPU seconds, medians", "runs": asked.runs, "times": found}
        asked.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
