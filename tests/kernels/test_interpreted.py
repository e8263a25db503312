"""The kernels under triton's interpreter: `interpreted_NAME.py`, and tests that also run without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
HERE = Path(__file__).parent
OTHERS = [HERE / "test_fused_layer.py", HERE.parent / "decoding" / "test_expansion.py"]
FILES = sorted([*HERE.glob("interpreted_*.py"), *OTHERS])


def test_interpreted_kernels() -> None:
    """In a process of their own: triton decides at its import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *FILES, "-k", "not hopper and not gradients_go"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
