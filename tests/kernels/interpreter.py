"""Runs tests of kernels under triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def passes_interpreted(name: str) -> None:
    """Run a file of tests in a process of its own: triton decides at its import whether it interprets.

    Raises:
        AssertionError: a test of it failed, was skipped, or none ran.
    """
    pytest.importorskip("triton", reason="the kernels need triton")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", here / name],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=here.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
