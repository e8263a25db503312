"""The same seed gives the same bytes, in any process, in any pieces, whatever else draws random numbers."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from longtrain.evaluation.ruler.tasks import TASKS

SCRIPT = """
import hashlib, json
from longtrain.evaluation.ruler.generate import Generator
from longtrain.evaluation.ruler.sizing import Framing, Material
from longtrain.evaluation.ruler.tasks import TASKS
class Words:
    chat_template = None
    def __call__(self, text, *, add_special_tokens, verbose):
        return type("E", (), {"input_ids": text.split()})
made = (Generator(Material(TASKS[t], 2000, Framing(Words()))) for t in TASKS if t[:2] != "qa")
rows = [vars(one.example(i)) for one in made for i in range(2)]
print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())
"""


def digest(examples) -> str:
    return hashlib.sha256(json.dumps([vars(example) for example in examples]).encode()).hexdigest()


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_bytes(make, task: str) -> None:
    random.seed(1)
    np.random.seed(1)
    once = make(task, length=2048, n=4, seed=5)
    state = random.getstate()
    random.seed(2)
    assert digest(make(task, length=2048, n=4, seed=5)) == digest(once)
    random.seed(1)
    assert random.getstate() == state
    assert make(task, length=2048, n=2, seed=5, start=2) == once[2:]
    other = make(task, length=2048, n=4, seed=6)
    assert all(a.input != b.input for a, b in zip(once, other, strict=True))
    assert len({example.input for example in once}) == 4
    if not task.startswith("qa"):
        assert len({example.answers for example in [*once, *other]}) == 8


def test_same_bytes_in_any_process(root) -> None:
    found = set()
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            cwd=root,
            env={"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        found.add(run.stdout)
    assert len(found) == 1
