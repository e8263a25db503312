"""NVIDIA's compute-sanitizer over small launches of every kernel; needs a GPU, and the tool."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUND = 9
"""Exit code of the tool where it found something."""
OWN = "========="
"""What the tool's own lines begin with."""


def tool() -> str:
    """The program: of the CUDA toolkit, or of the package nvidia-cuda-sanitizer-api."""
    places = [os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")]
    places += ["/usr/local/cuda/bin/compute-sanitizer"]
    places += [
        str(path)
        for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/compute-sanitizer")
    ]
    found = next((place for place in places if place and Path(place).is_file()), None)
    if found is None:
        pytest.skip(
            "compute-sanitizer is not there; pip install nvidia-cuda-sanitizer-api, or the CUDA toolkit"
        )
    return found


def checked(*words: str) -> subprocess.CompletedProcess:
    """`small_launches.py` under the tool."""
    paths = os.pathsep.join([str(HERE.parent.parent), *sys.path])
    command = [tool(), "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable]
    done = subprocess.run(
        [*command, HERE / "small_launches.py", *words],
        env={**os.environ, "PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    why = not_started(done.stdout) or not_started(done.stderr)
    if why:
        pytest.skip(f"compute-sanitizer does not serve this device: {why}")
    return done


def not_started(text: str) -> str | None:
    """The tool's own line that it does not serve the device, if that is the first thing it says."""
    own = [line.lstrip("= ") for line in text.splitlines() if line.startswith(OWN)]
    said = [line for line in own if line and line != "COMPUTE-SANITIZER"]
    first = said[0] if said else ""
    return first if first.startswith("Error:") and "not supported" in first else None


@pytest.mark.gpu
def test_the_tool_sees_a_read_behind_the_end():
    done = checked("--spoil")
    assert done.returncode == FOUND and "Invalid __global__ read" in done.stdout, done.stdout[-2000:]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_reads_or_writes_outside():
    """Every kernel of the package is launched, or the script itself says 1."""
    done = checked()
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]
